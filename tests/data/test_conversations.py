"""What a chat row says besides texts: tools, arguments of the template, what is learned, and what is not read."""

from __future__ import annotations

import copy
import datetime
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import transformers.utils.chat_template_utils
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import MARKED, PLAIN, chat_tokenizer, config
from transformers import PreTrainedTokenizerFast

from trainer.config import ConfigError, SourceConfig
from trainer.data.corpus import Corpus, open_corpus
from trainer.data.shards import TextPiece, encode_pieces
from trainer.data.tables import JsonLines, ParquetRows
from trainer.data.text import LEARNED, MARKS, TRIED, ChatTemplate, TextDocument
from trainer.data.tokenizer import byte_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if 'tool_calls' in message %}
            {%- set tool_call = message.tool_calls[0].function %}
            {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + '}<|eot_id|>' }}
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

ALTERNATE = (
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant') }}{%- endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    + ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    + ALTERNATE
    + "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend, **SPECIAL)

BYTES = SimpleNamespace(chat=True, tokenizer=byte_tokenizer())

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}
ENDS = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>\n"}
ALTERNATES = {"mistral", "gemma"}


def unmarked(template: str) -> str:
    for tag in ("{%- generation %}", "{%- endgeneration %}", "{% generation %}", "{% endgeneration %}"):
        template = template.replace(tag, "")
    return template


@st.composite
def tables(draw: Any, name: str) -> list[dict[str, Any]]:
    """Rows that a data set of one schema may have, for a template. Every text is a word of its own, so that it can be
    found in what is rendered."""
    numbers = iter(range(10_000))
    word = lambda kind: f"{kind}{next(numbers)}x"  # noqa: E731
    key, values = draw(st.sampled_from(MARKS)), draw(st.sampled_from([[0, 1, None], [False, True, None], [None]]))
    as_text, parts = draw(st.booleans()), draw(st.booleans())
    blanks = st.sampled_from(["", " ", "\n"]) if name in ("llama3", "gemma") else st.just("")

    def content(kind: str) -> Any:
        text = draw(blanks) + word(kind) + draw(blanks)
        return [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}] if parts else text

    def call() -> dict[str, Any]:
        # Parquet has one order of the keys: that in which they come first.
        arguments = {key: draw(st.integers(0, 9)) for key in "abc"[: draw(st.integers(1, 3))]}
        function = {"name": word("call"), "arguments": json.dumps(arguments) if as_text else arguments}
        return {"type": "function", "function": function}

    rows = []
    for _ in range(draw(st.integers(1, 3))):
        messages: list[dict[str, Any]] = []
        if name not in ALTERNATES:
            if draw(st.booleans()):
                messages.append({"role": "system", "content": content("system")})
            if draw(st.booleans()):
                messages.append({"role": "assistant", "content": content("answer"), key: draw(st.sampled_from(values))})
        for _ in range(draw(st.integers(1, 3))):
            messages.append({"role": "user", "content": content("user")})
            if name not in ALTERNATES and draw(st.booleans()):
                messages.append({"role": "assistant", "tool_calls": [call()], key: draw(st.sampled_from(values))})
                messages.append({"role": "tool", "content": content("tool")})
            elif name not in ALTERNATES and draw(st.booleans()):
                messages.append({"role": "assistant", "content": content("answer"), key: draw(st.sampled_from(values))})
            messages.append({"role": "assistant", "content": content("answer"), key: draw(st.sampled_from(values))})
        if draw(st.booleans()):
            messages.append({"role": "user", "content": content("user")})
        row: dict[str, Any] = {"messages": messages, "id": len(rows)}
        if name not in ALTERNATES and draw(st.booleans()):
            tools = [{"type": "function", "function": {"name": word("tool"), "parameters": {"type": "object"}}}]
            row["tools"] = json.dumps(tools) if as_text else tools
        if name == "llama3":
            row["chat_template_kwargs"] = {"date_string": word("date")}
        rows.append(row)
    return rows


def plain(row: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a generated row and its options, as transformers takes them."""
    messages = copy.deepcopy(row["messages"])
    for message in messages:
        for key in MARKS:
            message.pop(key, None)
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls", []):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = row.get("tools")
    options = {"tools": json.loads(tools) if isinstance(tools, str) else tools, **row.get("chat_template_kwargs", {})}
    return messages, options


def expected(name: str, row: dict[str, Any], text: str) -> list[tuple[int, int]]:
    """Where in the text of a conversation the answers that are to be learned lie, with their end marks."""
    spans = []
    for message in plain(row)[0]:
        if message["role"] == "assistant":
            if calls := message.get("tool_calls"):
                head = "<tool_call>" if name == "chatml" else ""
                first = text.index(f'{head}{{"name": "{calls[0]["function"]["name"]}"')
            else:
                said = message["content"] if name in ("chatml", "mistral") else message["content"].strip()
                first = text.index(said) - (name == "mistral")
            spans.append((first, text.index(ENDS[name], first) + len(ENDS[name])))
    marks = [
        [one[key] for key in MARKS if one.get(key) is not None] for one in row["messages"] if one["role"] == "assistant"
    ]
    return [span for span, mark in zip(spans, marks, strict=True) if all(mark)]


def read(folder: Path, rows: list[dict[str, Any]], template: ChatTemplate, kind: str, skip: bool = False) -> Any:
    path, source = folder / f"rows.{kind}", SourceConfig("chat")
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        reader = JsonLines("data.sources.chat", [str(path)], source, folder, skip, template)
        reader.take_tally()
    else:
        names = dict.fromkeys(name for row in rows for name in row)
        pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), path)
        reader = ParquetRows("data.sources.chat", [str(path)], source, skip, template)
    return list(reader.read(0, len(reader))), reader.tally


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_are_rendered_as_transformers_does_and_marked_answers_alone_are_learned(name, marked, data, folder):
    text = TEMPLATES[name] if marked else unmarked(TEMPLATES[name])
    rows = data.draw(tables(name))
    template = ChatTemplate(text, SPECIAL, "a template")
    found, tally = read(folder, rows, template, "jsonl")
    assert tally.unread == {"id": len(rows)} and tally.rows == len(rows)
    for row, document in zip(rows, found, strict=True):
        messages, options = plain(row)
        wanted = TOKENIZER.apply_chat_template(messages, chat_template=text, tokenize=False, **options)
        assert document.text == wanted
        spans = expected(name, row, wanted)
        assert list(document.spans) == spans
        ((ids, marks),) = encode_pieces(
            BYTES.tokenizer, [TextPiece(document.text, False, True, document.spans)], chat=True
        )
        said = bytes(token for token, mark in zip(ids, marks) if mark & LEARNED).decode()
        assert bytes(ids).decode() == wanted and said == "".join(wanted[first:last] for first, last in spans)
    again, tally = read(folder, rows, template, "parquet")
    assert again == [document._replace(unread=()) for document in found] and tally.unread == {"id": len(rows)}


USER, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "reply"}
BOTH = pytest.mark.parametrize("text", [MARKED, PLAIN], ids=["marked", "unmarked"])


def learned(document: TextDocument) -> list[str]:
    return [document.text[first:last] for first, last in document.spans]


def refused(row: dict[str, Any], text: str = CHATML) -> str:
    """Why a row is refused."""
    with pytest.raises(ValueError) as error:
        ChatTemplate(text, SPECIAL, "a template").document(row["messages"], {**row, "messages": None})
    return str(error.value)


@BOTH
@pytest.mark.parametrize("value", [0, 1, False, True, 0.0, 1.0, None])
@pytest.mark.parametrize("key", MARKS)
def test_a_mark_of_a_message_decides_whether_it_is_learned(text, key, value):
    template = ChatTemplate(text, SPECIAL, "a template")
    row = [USER, ANSWER, USER, {**ANSWER, "content": "other", key: value}, {**USER, key: None if value else value}]
    found = template.document(row)
    assert key not in found.text and not found.unread
    assert [said.split("<")[0] for said in learned(found)] == ["reply", "other"][: 1 + (value is None or bool(value))]


@pytest.mark.parametrize("value", [0.5, 2, -1, "0", "true", [1], {"a": 1}, float("nan")])
@pytest.mark.parametrize("key", MARKS)
def test_marks_that_are_neither_0_nor_1_are_refused(key, value):
    assert f"holds a message with {key}=" in refused({"messages": [USER, {**ANSWER, key: value}]})


def test_marks_that_cannot_be_honoured_are_refused():
    assert "role user that is to be learned (train=True)" in refused({"messages": [{**USER, "train": True}, ANSWER]})
    contradiction = {"messages": [USER, {**ANSWER, "weight": 1, "loss_mask": 0}]}
    assert "weight and loss_mask contradict each other" in refused(contradiction)


CONTROLS = ["train_detail", "loss_scale", "isTrainable", "train_on_turn", "lossMask", "loss_weight", "mask", "labels"]


@pytest.mark.parametrize("key", CONTROLS)
def test_unknown_keys_that_look_like_marks_are_refused(key, folder):
    assert f"holds a message with {key}, which seems to say what is learned" in refused(
        {"messages": [USER, {**ANSWER, key: 1}]}
    )


@pytest.mark.parametrize("key", ["weight", "sample_weight", "loss_mask", "train_on_input", "labels", "Train"])
def test_columns_that_look_like_marks_are_refused(key, folder):
    for kind in ("jsonl", "parquet"):
        with pytest.raises(ConfigError, match=f"rows.{kind}.* has a column {key}, which seems to say what is learned"):
            read(folder, [{"messages": [USER, ANSWER], key: 1}], ChatTemplate(CHATML, SPECIAL, "a template"), kind)


@pytest.mark.parametrize("key", ["constraints", "glossary", "unmasked", "used_in_training", "label"])
def test_other_columns_are_no_controls(key):
    found = ChatTemplate(CHATML, SPECIAL, "a template").document([USER, ANSWER], {key: 1})
    assert found.unread == (key,)


def test_nulls_of_parquet_structs_are_left_out_and_no_others(folder):
    template = ChatTemplate(CHATML, SPECIAL, "a template")

    def call(name: str, arguments: Any) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]

    rows = [call("weather", {"city": "Rome"}), call("add", {"a": 2, "b": [1, None]})]
    (first, second), _ = read(folder, [{"messages": row} for row in rows], template, "parquet")
    assert '"arguments": {"city": "Rome"}' in first.text and '"arguments": {"a": 2, "b": [1, null]}' in second.text
    for arguments in ('{"city": null}', {"city": None}):
        (found,), _ = read(folder, [{"messages": call("weather", arguments)}], template, "jsonl")
        assert '"arguments": {"city": null}' in found.text
    (found,), _ = read(folder, [{"messages": call("weather", '{"city": null}')}], template, "parquet")
    assert '"arguments": {"city": null}' in found.text
    calls = pyarrow.list_(pyarrow.struct({"name": pyarrow.string(), "arguments": pyarrow.map_("string", "int64")}))
    kind = pyarrow.list_(pyarrow.struct({"role": "string", "content": "string", "tool_calls": calls}))
    mapped = [USER, {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": None, "day": 1}}]}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": pyarrow.array([mapped], kind)}), folder / "map.parquet")
    reader = ParquetRows("data.sources.chat", [str(folder / "map.parquet")], SourceConfig("chat"), False, template)
    (found,) = reader.read(0, 1)
    assert '"arguments": {"city": null, "day": 1}' in found.text, "the keys of a map are the row's own"


ARGUMENTS = {
    "tojson": "{{ call.arguments | tojson }}",
    "joined": "{{ '' + call.arguments }}",
    "printed": "{{ call.arguments }}",
    "items": "{% for key, value in call.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}",
    "either": "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}",
}


@pytest.mark.parametrize("given", [{"city": "Rome"}, '{"city": "Rome"}'], ids=["mapping", "text"])
@pytest.mark.parametrize("form", ARGUMENTS)
def test_arguments_of_tool_calls_are_given_as_the_template_expects_them(form, given):
    calls = "{% for one in message.tool_calls or [] %}{% set call = one.function %}" + ARGUMENTS[form] + "{% endfor %}"
    text = PLAIN.replace("message.content", "(message.content or '')").replace("{{ '\n' }}", calls + "{{ '\n' }}")
    template = ChatTemplate(text, SPECIAL, "a template")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": given}}
    found = template.document([USER, {"role": "assistant", "tool_calls": [call]}])
    assert ("<city>Rome" if form == "items" else '{"city": "Rome"}') in found.text
    call["function"]["arguments"] = ""
    assert template.document([USER, {"role": "assistant", "tool_calls": [call]}]).text
    for wrong in ('{"city', "5", [1], [], 5, 0, False):
        call["function"]["arguments"] = wrong
        with pytest.raises(ValueError, match="arguments of a tool call"):
            template.document([USER, {"role": "assistant", "tool_calls": [call]}])
    assert "tool_calls, which the chat template does not read" in refused(
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}, PLAIN
    )


@pytest.mark.parametrize("kept", ["none", "defined"])
def test_messages_with_tool_calls_alone_have_the_content_that_the_template_expects(kept):
    """As of DeepSeek R1, which tests for null, and of templates that add to content."""
    lone = "message.content is none" if kept == "none" else "false"
    text = (
        "{% for message in messages %}<{{ message.role }}>{% if not "
        + lone
        + " %}{{ message.content + '.' }}{% endif %}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name + call.function.arguments }}{% endfor %}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for answer in ({}, {"content": None}):
        found = ChatTemplate(text, SPECIAL, "a template").document(
            [USER, {"role": "assistant", "tool_calls": [call], **answer}]
        )
        assert learned(found) == [("" if kept == "none" else ".") + 'add{"a": 1}<end>']


LISTED = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
CONTENTS = {
    "text": "{{ message.content }}",
    "first part": "{{ message.content if message.content is string else message.content[0].text }}",
    "parts": LISTED,
    "either": "{% if message.content is string %}{{ message.content }}{% else %}" + LISTED + "{% endif %}",
}


@pytest.mark.parametrize("form", CONTENTS)
def test_content_is_given_as_the_template_expects_it(form):
    text = "{% for message in messages %}<{{ message.role }}>" + CONTENTS[form] + "<end>{% endfor %}"
    text += "{% if add_generation_prompt %}<assistant>{% endif %}"
    template = ChatTemplate(text, SPECIAL, "a template")
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "cache_control": {"type": "x"}}]
    found = template.document([{**USER, "content": parts}, {**ANSWER, "content": parts}, USER, ANSWER])
    assert found.text == "<user>a b<end><assistant>a b<end><user>ask<end><assistant>reply<end>"
    assert learned(found) == ["a b<end>", "reply<end>"] and found.unread == ("messages[].content[].cache_control",)
    for part in ({"type": "image_url", "image_url": {}}, {"type": "text"}, "a", {"type": "text", "text": ["a"]}):
        with pytest.raises(ValueError, match="holds a message with a part .* that is no text"):
            template.document([{**USER, "content": [part]}, ANSWER])


SYSTEM = {"role": "system", "content": "help"}
SHAPES = {
    "begins with the assistant": ([ANSWER, USER, ANSWER], {"mistral", "gemma"}, "alternate"),
    "the assistant alone": ([ANSWER], {"mistral", "gemma"}, "alternate"),
    "two answers in a row": ([USER, ANSWER, ANSWER], {"mistral", "gemma"}, "alternate"),
    "ends with the user": ([USER, ANSWER, USER], set(), ""),
    "a system message": ([SYSTEM, USER, ANSWER], {"mistral", "gemma"}, "alternate|System role"),
    "no answer": ([USER], set(TEMPLATES), "holds nothing that the assistant says"),
    "only a system message": ([SYSTEM], set(TEMPLATES), "holds nothing that the assistant says"),
    "empty": ([], set(TEMPLATES), "holds no messages"),
    "null": (None, set(TEMPLATES), "holds no messages"),
    "a null message": ([None], set(TEMPLATES), "holds a list instead of a list of messages"),
    "an unknown role": (
        [USER, {**ANSWER, "role": "bot"}],
        set(TEMPLATES),
        "role is bot; legal: assistant, developer, ",
    ),
    "no role": ([USER, {"content": "a"}], set(TEMPLATES), "holds a message whose role is None"),
    "no content": ([USER, {"role": "assistant"}], set(TEMPLATES), "holds a message whose content is None"),
}


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_conversation_works_or_is_refused_by_row_and_reason(shape, name, marked, folder):
    messages, fails, reason = SHAPES[shape]
    template = ChatTemplate(TEMPLATES[name] if marked else unmarked(TEMPLATES[name]), SPECIAL, "a template")
    rows = [{"messages": [USER, ANSWER]}, {"messages": messages}]
    if name not in fails:
        found, _ = read(folder, rows, template, "jsonl")
        spoken = [message for message in messages if message["role"] == "assistant"]
        assert [said.strip().removesuffix(ENDS[name].strip()) for said in learned(found[1])] == ["reply"] * len(spoken)
        return
    if not messages:  # rows without messages are counted, and who opens the corpus refuses them
        for kind in ("jsonl", "parquet"):
            found, tally = read(folder, rows, template, kind)
            assert len(found) == tally.damaged == 1 and re.search(f"(byte [1-9]|row 1 ).*{reason}", tally.first)
        return
    with pytest.raises(ConfigError, match=f"rows.jsonl, the line at byte [1-9][0-9]*, .*({reason})"):
        read(folder, rows, template, "jsonl")
    found, tally = read(folder, rows, template, "jsonl", skip=True)
    assert len(found) == 1 and (tally.rows, tally.damaged) == (2, 1)
    if shape != "a null message":
        with pytest.raises(ConfigError, match=f"rows.parquet, row 1 of row group 0, .*({reason})"):
            read(folder, rows, template, "parquet")
        found, tally = read(folder, rows, template, "parquet", skip=True)
        assert len(found) == 1 and (tally.rows, tally.damaged) == (2, 1)


def test_rows_without_the_column_are_refused_or_counted(folder):
    template = ChatTemplate(CHATML, SPECIAL, "a template")
    rows = [{"messages": [USER, ANSWER]}, {"prompt": "a", "completion": "b"}]
    for skip in (False, True):
        found, tally = read(folder, rows, template, "jsonl", skip)
        assert len(found) == tally.damaged == 1 and "holds no messages" in tally.first
    for kind in ("jsonl", "parquet"):
        with pytest.raises(
            ConfigError, match="messages=messages is no column of .*rows.*prompt and answer is written as"
        ):
            read(folder, rows[1:], template, kind)


def test_conversations_of_sharegpt():
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    said = [("system", "s"), ("human", "a"), ("gpt", "x"), ("function_call", call), ("observation", "o"), ("gpt", "y")]
    template = ChatTemplate(CHATML, SPECIAL, "a template")
    found = template.document(
        [
            {"from": role, "value": value, "weight": int(role != "observation" and value != "x")}
            for role, value in said[2:]
        ]
    )
    assert learned(found)[0].startswith('<tool_call>{"name": "add", "arguments": {"a": 1}}') and len(found.spans) == 2
    found = template.document([{"from": role, "value": value} for role, value in said])
    assert "<|im_start|>tool\no<|im_end|>" in found.text and len(found.spans) == 3
    assert "role is bing" in refused({"messages": [{"from": "bing", "value": "a"}]})
    assert "without a function's name" in refused({"messages": [{"from": "function_call", "value": "{}"}]})


@BOTH
def test_a_word_of_the_template_is_no_key_that_it_reads(text):
    """Templates print the name of a function, and not that of a user. The first row does not decide for others."""
    says = (
        "(message.tool_calls[0].function.name if message.tool_calls else '') + (message.mood or '') + message.content"
    )
    template = ChatTemplate(text.replace("message.content", says), SPECIAL, "a template")
    for key in ("name", "function"):
        assert template.document([{**USER, key: "x"}, ANSWER]).unread == (f"messages[].{key}",)
    for mood, unread in (("", ("messages[].mood",)), ("x", ())):
        assert template.document([{**USER, "mood": mood}, ANSWER]).unread == unread


@BOTH
def test_keys_that_are_not_read_are_looked_for_in_some_rows(text, monkeypatch):
    rendered, render = [], ChatTemplate._render
    monkeypatch.setattr(
        ChatTemplate, "_render", lambda *given, **options: rendered.append(given) or render(*given, **options)
    )
    template = ChatTemplate(text, SPECIAL, "a template")
    template.document([USER, ANSWER])  # finds out that roles are read
    before, rows = len(rendered), TRIED + 20
    for _ in range(rows):
        assert template.document([{**USER, "id": 3}, ANSWER]).unread == ("messages[].id",)
    alone = len(rendered)
    for _ in range(rows):
        template.document([USER, ANSWER])
    assert alone - before == len(rendered) - alone + TRIED


@BOTH
def test_reasoning_and_what_the_template_leaves_out(text, monkeypatch):
    rendering = transformers.utils.chat_template_utils  # of version 4, which knows no other names of reasoning
    monkeypatch.setattr(rendering, "_alias_reasoning_fields", lambda chat: chat, raising=False)
    reads = text.replace("message.content", "(message.reasoning_content or '') + message.content")
    for key in ("reasoning_content", "reasoning", "thinking"):
        row = [USER, {**ANSWER, key: "because "}]
        assert ChatTemplate(text, SPECIAL, "a template").document(row).unread == (f"messages[].{key}",)
        found = ChatTemplate(reads, SPECIAL, "a template").document(row)
        assert found.unread == () and learned(found)[0].startswith("because reply")
    whole = PLAIN.replace("message.content", "(message | tojson)")
    assert ChatTemplate(whole, SPECIAL, "a template").document([USER, {**ANSWER, "mood": "x"}]).unread == ()
    found = ChatTemplate(text, SPECIAL, "a template").document(
        [{**USER, "name": "Ann"}, {**ANSWER, "mood": "x"}, {**ANSWER, "mood": None}],
        {
            "tools": [{"a": 1}],
            "documents": [],
            "chat_template_kwargs": {"depth": 1},
            "enable_thinking": True,
            "id": None,
        },
    )
    assert found.unread == (
        *("chat_template_kwargs.depth", "documents", "enable_thinking", "messages[].mood", "messages[].name", "tools"),
    )
    drops = text.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}")
    found = ChatTemplate(drops, SPECIAL, "a template").document([SYSTEM, USER, ANSWER])
    assert found.unread == ("messages of role system",)


def test_arguments_of_the_template_that_are_refused():
    row = {"messages": [USER, ANSWER]}
    for value in ({"messages": []}, {"eos_token": "x"}, {"add_generation_prompt": True}, [1], "[", 5):
        assert "chat_template_kwargs that are no" in refused({**row, "chat_template_kwargs": value})
    for value in (1, ["a"], [["a"]], "5", "{"):
        assert "has tools that are" in refused({**row, "tools": value})
    thinks = CHATML + "{% if enable_thinking %}{% endif %}"
    both = {**row, "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert "contradicts its chat_template_kwargs" in refused(both, thinks)


def test_answers_that_the_template_marks_together_cannot_be_told_apart():
    joined = (
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}{% generation %}"
        "{% for message in messages if message.role == 'assistant' %}{{ message.content }}{% endfor %}"
        "{% endgeneration %}"
    )
    template = ChatTemplate(joined, SPECIAL, "a template")
    assert learned(template.document([USER, ANSWER, USER, ANSWER])) == ["replyreply"]
    assert learned(template.document([USER, {**ANSWER, "train": 0}, USER, {**ANSWER, "train": 0}])) == []
    with pytest.raises(ValueError, match="does not mark answers one by one"):
        template.document([USER, {**ANSWER, "train": 0}, USER, ANSWER])


@pytest.mark.parametrize("varies", ["{{ ['a', 'b'] | random }}", "{{ lipsum(1) }}"])
def test_templates_that_render_differently_each_time_are_refused(varies):
    with pytest.raises(ConfigError, match="renders the same conversation in different ways"):
        ChatTemplate(PLAIN + varies, SPECIAL, "a template")


def opened(folder: Path, rows: list[dict[str, Any]], template: str, length: int = 64) -> Corpus:
    chat_tokenizer(folder / "tokenizer", template)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = config(folder, length, str(folder / "tokenizer"), chat=SourceConfig("chat", str(folder / "rows.jsonl")))
    made.data.eval_fraction, made.data.mask_documents = 0.0, True
    return open_corpus(made)


def test_a_date_in_the_template_is_the_same_on_all_days(tmp_path, monkeypatch):
    formats = ["%d %b %Y", "%B %-d, %Y", "%Y-%m-%d %H:%M", "%A %j %x %%"]
    dated = "".join(f"{{{{ strftime_now('{one}') }}}}|" for one in formats) + PLAIN
    rows, found = [{"messages": [USER, ANSWER], "id": 1, "source": "x"}] * 3, []
    for day in (1, 2):
        moment = datetime.datetime(2031, 5, day, day, day)
        clock = type("Clock", (datetime.datetime,), {"now": classmethod(lambda cls, moment=moment: moment)})
        monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", clock)
        found.append(opened(tmp_path / str(day), rows, dated, 256))
    first, second = found
    assert first.fingerprint == second.fingerprint
    (one, other) = ([*(tmp_path / day / "cache/tokens").glob("*/*.bin")] for day in "12")
    assert one[0].read_bytes() == other[0].read_bytes()
    text = first.tokenizer.decode(first.train.get(0).tokens)
    assert text.startswith("26 Jul 2024|July 26, 2024|2024-07-26 00:00|Friday 208 07/26/24 %|")
    assert first.notes[:2] == [
        "data.sources.chat: columns not read: id, source (3 rows)",
        "data.sources.chat: the chat template asks for the date of today, and gets 26 Jul 2024",
    ]
    again = opened(tmp_path / "2", rows, dated, 256)
    assert again.notes == second.notes, "what is not read is also told of cached tokens"


def test_names_that_are_not_read_are_counted_each_up_to_a_limit(tmp_path):
    rows = [{"messages": [USER, ANSWER], f"column{number}\n": 1, "id": None} for number in range(60)]
    (note,) = opened(tmp_path, rows, PLAIN).notes
    assert "column0, column1, " in note and "column49 (1 rows), others (10 rows)" in note and "id" not in note
