"""Conversations: what is learned of them is what the assistant says, and no conversation sees or cuts another."""

from __future__ import annotations

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import (
    MARKED,
    PLAIN,
    chat_tokenizer,
    config,
    conversations,
    texts,
    write_conversations,
    write_jsonl,
)
from transformers import AutoTokenizer

from trainer.config import ConfigError, SourceConfig
from trainer.data.batches import eval_batches
from trainer.data.corpus import Corpus, open_corpus
from trainer.data.text import pack_lengths
from trainer.model.loss import IGNORE
from trainer.planning import resolve

ROWS = conversations(40)
UNREAD = "data.sources.chat: columns not read: id (40 rows)"


@pytest.fixture
def opened(tmp_path):
    """Opens a corpus of conversations; by default of all rows, none of which is held out."""

    def opened(template: str | None = MARKED, path=None, length: int = 256, fraction: float = 0.0, **source) -> Corpus:
        chat_tokenizer(tmp_path / "tokenizer", template)
        path = path or write_conversations(tmp_path / "chat.jsonl", ROWS)
        made = config(tmp_path, length, str(tmp_path / "tokenizer"), chat=SourceConfig("chat", str(path), **source))
        made.data.eval_fraction, made.data.mask_documents = fraction, True
        return open_corpus(made)

    return opened


def pieces(corpus: Corpus) -> dict[tuple[int, ...], list[bool]]:
    """Every conversation's tokens, and which of them are learned."""
    found = {}
    for index in range(len(corpus.train)):
        tokens, documents, learned = corpus.train.get(index)
        for number in range(documents.max() + 1):
            mine = documents == number
            found[tuple(tokens[mine].tolist())] = learned[mine].tolist()
    return found


def theirs(tokenizer, template: str = MARKED) -> dict[tuple[int, ...], list[bool]]:
    """The same by transformers."""
    found = {}
    for row in ROWS:
        rendered = tokenizer.apply_chat_template(
            row, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        found[tuple(rendered["input_ids"])] = [bool(mark) for mark in rendered["assistant_masks"]]
    return found


def test_marked_templates_have_transformers_own_masks(opened, tmp_path):
    found = pieces(opened())
    expected = theirs(AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False))
    assert len(expected) == len(ROWS) and found.items() >= expected.items()
    padding = [tokens for tokens in found.keys() - expected.keys()]
    assert all(not any(found[tokens]) and set(tokens) == {257} for tokens in padding), "the end mark fills up"


def test_without_marks_an_answer_is_what_follows_its_prompt(opened, tmp_path):
    found = pieces(opened(PLAIN))
    marked = theirs(AutoTokenizer.from_pretrained(tmp_path / "tokenizer", trust_remote_code=False))
    for tokens, learned in marked.items():
        line_ends = [mine and not after for mine, after in zip([False, *learned], [*learned, False])][:-1]
        assert found[tokens] == [mine or end for mine, end in zip(learned, line_ends)], "its line's end belongs to it"


def test_targets_are_what_the_assistant_says_next(opened):
    corpus = opened()
    learned = sum(sum(mask) for mask in pieces(corpus).values())
    (batch,) = eval_batches(corpus.train, 1000, len(corpus.train), 0, 1, mask_documents=True)
    assert (batch.targets != IGNORE).sum() == learned
    spoken = corpus.tokenizer.decode(batch.targets[batch.targets != IGNORE])
    assert spoken.count("It is") == sum(message["role"] == "assistant" for row in ROWS for message in row)
    assert "What" not in spoken and "user" not in spoken


def test_sources_of_other_forms_hold_the_same(opened, tmp_path):
    expected = pieces(opened())
    roles = {"user": "human", "assistant": "gpt"}
    other = [[{"from": roles.get(m["role"], m["role"]), "value": m["content"]} for m in row] for row in ROWS]
    path = write_conversations(tmp_path / "other.jsonl", other, "conversations")
    assert pieces(opened(path=path, messages="conversations")) == expected
    (tmp_path / "tables").mkdir()
    table = pyarrow.table({"id": list(range(len(ROWS))), "messages": ROWS})
    pyarrow.parquet.write_table(table, tmp_path / "tables/chat.parquet", row_group_size=7)
    assert pieces(opened(path=tmp_path / "tables")) == expected
    write_conversations(tmp_path / "tables/chat.jsonl", ROWS)
    with pytest.raises(ConfigError, match="data.sources.chat.path=.* holds both JSON and Parquet"):
        opened(path=tmp_path / "tables")


def test_a_conversation_longer_than_a_sequence_ends_there_and_is_counted(opened):
    whole, cut = opened(), opened(length=100)
    longer = [tokens for tokens in pieces(whole) if len(tokens) > 101 and 258 in tokens]
    assert longer and cut.notes == [
        UNREAD,
        f"data.sources.chat: {len(longer)} conversations are longer than batch.sequence_length=100, and end there",
    ]
    assert {tokens[:101] for tokens in pieces(whole) if 258 in tokens} <= pieces(cut).keys() and whole.notes == [UNREAD]


def test_conversations_are_held_out_whole(opened):
    whole, corpus = pieces(opened()), opened(fraction=0.25)
    trained = pieces(corpus)
    held = {tokens: learned for tokens, learned in whole.items() if tokens not in trained}
    (batch,) = eval_batches(corpus.eval, 1000, len(corpus.eval), 0, 1, mask_documents=True)
    assert 0 < (batch.targets != IGNORE).sum() == sum(map(sum, held.values()))


def test_the_template_may_be_a_file_and_stays_with_the_tokenizer(opened, tmp_path):
    chat_tokenizer(tmp_path / "tokenizer", None)
    (tmp_path / "chat.jinja").write_text(MARKED, "utf-8-sig")  # with a byte order mark, as some editors write it
    write_conversations(tmp_path / "chat.jsonl", ROWS)
    for tokenizer in (str(tmp_path / "tokenizer"), "bytes"):
        made = config(tmp_path, 256, tokenizer, chat=SourceConfig("chat", str(tmp_path / "chat.jsonl")))
        made.data.chat_template, made.data.mask_documents = str(tmp_path / "chat.jinja"), True
        assert not resolve.config_problems(made)
        open_corpus(made).tokenizer.save(tmp_path / "saved")
        saved = AutoTokenizer.from_pretrained(tmp_path / "saved", trust_remote_code=False)
        assert saved.apply_chat_template(ROWS[0], tokenize=False).startswith("<|im_start|>system\nAnswer.<|im_end|>")


FORGETS = PLAIN.replace("message.content", "(message.content if loop.last else '...')")


@pytest.mark.parametrize(
    "template, problem",
    [
        (
            None,
            "data.sources.chat.kind=chat needs a chat template, and data.tokenizer=.*tokenizer has none; set data.chat",
        ),
        (
            "{% for %}",
            "the chat template of data.tokenizer=.* cannot be used: the chat template fails: .*; name another",
        ),
        ("{{ raise_exception('no') }}", "fails: no; name another by data.chat_template"),
        ("{{ messages[0].__class__.__mro__ }}", "cannot be used: .*unsafe"),
        (FORGETS, "renders the beginning of a conversation otherwise than the whole of it.*markers"),
    ],
)
def test_templates_that_are_refused(opened, template, problem):
    with pytest.raises(ConfigError, match=problem):
        opened(template)


@pytest.mark.parametrize(
    "row, problem",
    [
        ("hello", "holds hello instead of a list of messages in data.sources.chat.messages=messages"),
        ([{"content": "a"}], "holds a message whose role is None"),
        ([{"role": "user", "content": ["a"]}], "holds a message with a part a that is no text"),
        ([{"role": "user", "content": {"a": 1}}], "holds a message whose content is a mapping instead of text"),
        ([{"role": "user", "content": "a"}], "holds nothing that the assistant says"),
        ([{"role": "assistant", "content": "\ud800"}], "holds half of a surrogate pair"),
    ],
)
def test_rows_that_are_no_conversations_stop_or_are_left_out(opened, tmp_path, row, problem):
    path = write_conversations(tmp_path / "damaged.jsonl", [*ROWS, row])
    for template in (MARKED, PLAIN):
        with pytest.raises(ConfigError, match=f"damaged.jsonl, the line at byte [0-9]+, {problem}"):
            opened(template, path)
    made = config(tmp_path, 256, str(tmp_path / "tokenizer"), chat=SourceConfig("chat", str(path)))
    made.data.on_error, made.data.max_damaged, made.data.eval_fraction = "skip", 0.1, 0.0
    corpus = open_corpus(made)
    assert corpus.damaged == 1 and pieces(corpus) == pieces(opened(PLAIN))
    assert corpus.notes == ["data.sources.chat: 1 of 41 rows cannot be read and are left out", UNREAD]


def test_settings_that_contradict_conversations(tmp_path):
    made = config(tmp_path, chat=SourceConfig("chat", "x"))
    assert "data.sources.chat.kind=chat needs data.mask_documents=true" in "".join(resolve.config_problems(made))
    made = config(tmp_path, text=SourceConfig("text", "x"))
    made.data.chat_template = "y"
    assert "data.chat_template=y is for conversations, and no corpus has kind=chat" in "".join(
        resolve.config_problems(made)
    )
    with pytest.raises(
        ConfigError, match="data.tokenizer=bpe is trained on text, and all of data.sources are token files"
    ):
        open_corpus(
            config(tmp_path, 64, "bpe", chat=SourceConfig("chat", str(write_conversations(tmp_path / "a", ROWS))))
        )


def test_a_mixture_with_text_masks_conversations_alone(opened, tmp_path):
    opened()
    text = SourceConfig("jsonl", str(write_jsonl(tmp_path / "a.jsonl", texts(60))))
    chat = SourceConfig("chat", str(tmp_path / "chat.jsonl"))
    corpus = open_corpus(config(tmp_path, 256, str(tmp_path / "tokenizer"), a=text, chat=chat))
    samples = [corpus.train.get(index) for index in range(len(corpus.train))]
    assert [sample.learned is None for sample in samples].count(True) == corpus.train.sources[0].length > 1


@given(st.lists(st.integers(1, 50), max_size=60))
@settings(deadline=None, max_examples=60)
def test_packing_loses_nothing_and_leaves_no_two_sequences_that_fit_into_one(lengths):
    order, ends = pack_lengths(np.array(lengths, np.int64), 50)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in part) for part in np.split(order, ends[:-1])] if lengths else []
    assert all(0 < size <= 50 for size in filled) and len(filled) == len(ends)
    assert all(one + other > 50 for number, one in enumerate(filled) for other in filled[:number])
