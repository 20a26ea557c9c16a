"""Text files in chunks of whole lines, and conversations as text."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trainer.config import ConfigError
from trainer.data.tokens import PackedSequences, TokenRun, TokenSample, check_vocabulary, locate_index, shared_map
from trainer.hf.tokenizer import MARKERS, render_chat
from trainer.util.reading import on_one_line, parse_json, read_bytes, shorten_foreign

CHUNK_BYTES = 64 << 10
"""Longer files are cut at line ends into chunks, so that a part of a single file can be held out or be a shard."""

LINE = 32 << 20
"""Bytes of the longest line: several times the longest book, and far below what a process can hold parsed."""


NAMES = 50
"""Names that are not read and are counted each: keys of a damaged file may all differ."""


class TextDocument(NamedTuple):
    """A text, and whether a document ends with it (long files come in several chunks; the last is empty where all of
    its lines were left out). spans: of a conversation, the characters that are learned. unread: names in its row that
    do not change its text."""

    text: str
    final: bool = True
    spans: tuple[tuple[int, int], ...] | None = None
    unread: tuple[str, ...] = ()


class Absent(ValueError):
    """A row has no value where its text should be."""


def plain_text(value: Any) -> str:
    """A value, if it is text. Raises `ValueError`, and `Absent` for null."""
    if value is None:
        raise Absent("holds null or nothing instead of text")
    if not isinstance(value, str):
        raise ValueError(f"holds {shorten_foreign(value)} instead of text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text,") from None
    return value


def is_text(data: bytes) -> bool:
    """Whether `data` is UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass
class RowTally:
    """The rows of a source (lines, where it has no rows) that were read, and those of them that were left out as
    damaged. first: what was wrong with the first of these. empty: rows whose text has no characters, and which make no
    document. crlf: lines of a text file that end in a carriage return and a line feed, both of which are kept. unread:
    how many rows have each column or key that is not read."""

    rows: int = 0
    damaged: int = 0
    first: str = ""
    empty: int = 0
    crlf: int = 0
    unread: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: RowTally) -> RowTally:
        counts = self.rows + other.rows, self.damaged + other.damaged
        made = RowTally(*counts, self.first or other.first, self.empty + other.empty, self.crlf + other.crlf)
        for part in (self, other):
            for name, rows in part.unread.items():
                made.count_unread([name], rows)
        return made

    def count_unread(self, names: Iterable[str], rows: int = 1) -> None:
        """Counts `rows` rows that have these names. Names beyond `NAMES` are counted together."""
        for name in names:
            if name not in self.unread:
                name = on_one_line(name)
                name = name if name in self.unread or len(self.unread) < NAMES else "others"
            self.unread[name] = self.unread.get(name, 0) + rows


class DamagedRows:
    """What a reader of rows does with one that cannot be read: it ends the reading (data.on_error=stop), or is left out
    and counted in `tally` (skip). A row without a text is counted under both; who opens the corpus then refuses it
    under stop, and can name how many rows there are."""

    def __init__(self, skip: bool):
        self.skip, self.tally = skip, RowTally()

    def take_tally(self) -> RowTally:
        """What was counted since the last call."""
        taken, self.tally = self.tally, RowTally()
        return taken

    def begins_inside(self, number: int) -> bool:
        """Whether what `read` counts as document `number` begins inside of a document."""
        return False

    def leave_out(self, problem: ConfigError, rows: int = 1, absent: bool = False) -> None:
        """Counts rows that are left out. Raises `problem`, unless damaged rows are skipped or the text is absent."""
        if not self.skip and not absent:
            raise problem
        self.tally += RowTally(0, rows, str(problem))

    def keep(self, document: TextDocument) -> Iterator[TextDocument]:
        """The document, unless it is empty, which is counted."""
        if document.text:
            yield document
        else:
            self.tally.empty += 1


class TextFiles(DamagedRows):
    """Text files, one document each; `len` and `read` count chunks of at most about `CHUNK_BYTES`.

    setting: the source's own, such as data.sources.NAME."""

    def __init__(self, setting: str, paths: list[str], strict: bool, skip: bool = False):
        super().__init__(skip)
        self.setting, self.paths, self.strict = setting, paths, strict
        self._measure([os.path.getsize(path) for path in paths])

    def _measure(self, sizes: list[int]) -> None:
        self.sizes, self.bytes = sizes, sum(sizes)
        self._ends = np.cumsum([max(1, math.ceil(size / CHUNK_BYTES)) for size in sizes])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, chunk: int) -> tuple[int, int]:
        """The file of a chunk, and the chunk's number within it."""
        return locate_index(self._ends, chunk)

    def begins_inside(self, number: int) -> bool:
        return self.locate(number)[1] > 0

    def read(self, first: int, last: int) -> Iterator[TextDocument]:
        """The texts of some chunks. Raises `ConfigError` naming the file, unless what is not UTF-8 is skipped."""
        for chunk in range(first, last):
            file, number = self.locate(chunk)
            start, data = self.lines(file, number)
            final = start + len(data) >= self.sizes[file]
            if start == 0:
                data = self._without_mark(data, self.paths[file])
            text = self._decoded(data, self.paths[file])
            if text or final and data:
                yield TextDocument(text, final)

    def _without_mark(self, data: bytes, path: str) -> bytes:
        """The beginning of a file without the byte order mark of UTF-8. Raises `ConfigError` for UTF-16 and UTF-32, of
        which many lines would pass as UTF-8 with NUL characters."""
        head = data[:4096]
        if self.strict and (head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or head.count(0) > len(head) // 8):
            raise ConfigError(
                f"{self.setting}.path: {path} is not UTF-8 text: it begins as UTF-16, UTF-32 or binary data does; "
                "convert it to UTF-8, or leave it out with a glob such as 'folder/**/*.txt'"
            )
        return data.removeprefix(BOM_UTF8)

    def _decoded(self, data: bytes, path: str) -> str:
        lines = data.splitlines(keepends=True)
        self.tally.rows += len(lines)
        self.tally.crlf += data.count(b"\r\n")
        try:
            return data.decode("utf-8", "strict" if self.strict else "replace")
        except UnicodeDecodeError as error:
            problem = ConfigError(
                f"{self.setting}.path: {path} is not UTF-8 text ({error}); convert it, leave it out with a glob such "
                "as 'folder/**/*.txt', or leave out its damaged lines with data.on_error=skip"
            )
        kept = list(filter(is_text, lines))
        self.leave_out(problem, len(lines) - len(kept))
        return b"".join(kept).decode()

    def lines(self, file: int, number: int) -> tuple[int, bytes]:
        """Where the lines begin that start within the chunk's bytes, and these lines: cuts never fall into a line, and
        so never into a character."""
        path, start = self.paths[file], number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self.sizes[file])
        try:
            with open(path, "rb") as handle:
                if start:
                    handle.seek(start - 1)
                    self._line(handle)
                start = handle.tell()
                data = handle.read(max(0, end - start))
                if data and not data.endswith(b"\n"):
                    data += self._line(handle)
                return start, data
        except OSError as error:
            raise ConfigError(f"{self.setting}.path: {path} cannot be read: {error.strerror}") from error

    def _line(self, handle: BinaryIO) -> bytes:
        """The rest of a line."""
        line = handle.readline(LINE)
        if len(line) == LINE and not line.endswith(b"\n"):
            raise ConfigError(
                f"{self.setting}.path: {handle.name} has a line of more than {LINE} bytes; break it into several, or "
                "leave the file out"
            )
        return line

    def keep_lines(self, count: int) -> None:
        """Keeps the first lines, blank ones not counted, and leaves out what comes behind them."""
        for chunk in range(len(self)):
            file, number = self.locate(chunk)
            offset, data = self.lines(file, number)
            for line in data.split(b"\n"):
                offset, count = offset + len(line) + 1, count - bool(line.strip())
                if not count:
                    self.paths = self.paths[: file + 1]
                    return self._measure([*self.sizes[:file], min(offset, self.sizes[file])])


# Conversations: rendered to text by a chat template, of which the assistant's part is learned, and packed whole.


LEARNED, FIRST = 1, 2
"""Bits of a token's mark: the assistant says it; a conversation begins with it."""

TEMPLATE = 1 << 20
"""Bytes of a template; the longest that are published have some 20 KiB."""

SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT's {from, value} messages, where they differ from those of {role, content}."""

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
"""Roles that a message may have without being named by the template."""

MARKS = ("weight", "train", "trainable", "training", "loss", "loss_mask")
"""Keys that say whether a message is learned, 0 or 1 (false or true). The default is 1 for the assistant's messages.

`weight` is from OpenAI's fine-tuning format ("controls whether the assistant message is trained against (0 or 1)"),
`train` and `training` are the usual values of axolotl's `message_field_training`, `loss_mask` is from verl, `loss` from
ms-swift, and `trainable` from Tinker's cookbook."""

CONTROL = re.compile("(?<![a-z])(?:sample_weight|train|loss|mask|weight|labels)|Train|Loss|Mask|Weight|Labels")
"""In names of other keys that probably say what is learned, such as axolotl's `train_detail`."""

OPTIONS = ("tools", "documents", "chat_template_kwargs", "enable_thinking")
"""Columns that are passed to the template: those of TRL's conversational data sets and of transformers'
apply_chat_template, and verl's enable_thinking."""

RESERVED = {
    *("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("conversations", "return_assistant_tokens_mask", "tokenize"),
}
"""Arguments of apply_chat_template that a row's chat_template_kwargs cannot set."""

TRIED = 100
"""Rows of which a chat template is rendered once more without a key, to find out whether it reads the key."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's reasoning. transformers 5 passes any of them to templates as the first two."""

SENTINEL = "Sentinel3f9a7c"
"""Stands in one message at a time to find the spans that it makes."""

PROBE = [{"role": "user", "content": "probed question"}, {"role": "assistant", "content": "probed answer"}]

FIXED_DATE = datetime(2024, 7, 26)
"""The date that templates print (strftime_now): else the same rows would give other tokens every day. It is the date
that Llama 3.1's template has where it is given none."""

DATE_CODES = [*(f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcCdDeFfgGhHIjlmMpPrRSTuUVwWxXyYzZ"), "%%"]
"""What formats of dates may hold."""

VARIES = re.compile(r"\|\s*random\b|\blipsum\b")
"""What makes a template render the same row in different ways, besides the date."""


def fix_date(template: str) -> str:
    """A template in which `strftime_now` is a macro that prints `FIXED_DATE`. The line break ends its line and is not
    printed: transformers renders with trim_blocks."""
    if "strftime_now" not in template:
        return template
    filters = "".join(f"|replace('{code}', '{FIXED_DATE.strftime(code)}')" for code in DATE_CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


def read_template(path: str) -> str:
    """The text of a template's file. Raises `ConfigError`."""
    named = f"data.chat_template={path}"
    try:
        return read_bytes(Path(path).expanduser(), TEMPLATE).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{named} cannot be read: {shorten_foreign(error)}; name the file of a Jinja template"
        ) from None


class ChatTemplate:
    """Makes documents of conversations. text: the template; special: the tokenizer's special tokens by name.

    Templates expect content as text or as a list of parts, arguments of tool calls as a mapping (transformers'
    documentation) or as JSON text (OpenAI's format), and beside tool calls no content, null or an empty text. Which of
    them it renders is tried once, and conversations are converted to that. Raises `ConfigError` for a template that
    cannot render two messages."""

    def __init__(self, text: str, special: dict[str, str], named: str):
        self.text, self.special = fix_date(text), special
        self.prints_date = self.text != text
        parts = [self.text, special]
        self.digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()
        self._words, self._quoted = set(re.findall(r"\w+", text)), set(re.findall(r"""['"](\w+)['"]""", text))
        self._reads: dict[str, bool] = {}
        self._tried = Counter[str]()
        way_out = "name another by data.chat_template"
        if found := VARIES.search(text):
            raise ConfigError(
                f"{named} cannot be used: {found[0]} renders the same conversation in different ways; {way_out}"
            )
        try:
            self._render(PROBE)
        except ValueError as error:
            raise ConfigError(f"{named} cannot be used: {shorten_foreign(error)}; {way_out}") from None
        pieces = [[{"type": "text", "text": one} for one in message["content"].split()] for message in PROBE]
        self.takes_text = self._shows("answer", PROBE[1])
        self.takes_parts = self._shows("answer", {"content": pieces[1]}, asked=pieces[0])
        if not self.takes_text and not self.takes_parts:
            raise ConfigError(f"{named} cannot be used: it leaves out what the assistant says; {way_out}")
        arguments = {"key": "value"}
        calls = [
            [{"id": "call00000", "type": "function", "function": {"name": "name", "arguments": given}}]
            for given in (arguments, json.dumps(arguments))
        ]
        forms = itertools.product(({}, {"content": None}, {"content": ""}), (True, False))
        self.no_content, self.takes_mapping = next(
            (form for form in forms if self._shows("value", {**form[0], "tool_calls": calls[not form[1]]})), ({}, True)
        )

    def _shows(self, word: str, answer: dict[str, Any], asked: Any = PROBE[0]["content"]) -> bool:
        """Whether the template prints a word of an assistant's message, and no value as Python writes it."""
        try:
            text, _ = self._render([{"role": "user", "content": asked}, {"role": "assistant", **answer}])
        except ValueError:
            return False
        return word in text and not any(written in text for written in ("'type'", "'key'", "None"))

    def _render(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any] | None = None, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        return render_chat(self.text, messages, {**self.special, **(options or {})}, prompt)

    def document(self, value: Any, row: Mapping[str, Any] | None = None) -> TextDocument:
        """The text of a conversation, and where in it the assistant says what is to be learned. value: its messages;
        row: the other columns of its row. Raises `ValueError` for what is no conversation, or cannot be honoured."""
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise ValueError(f"holds {shorten_foreign(value)} instead of a list of messages")
        options, unread = self._read_options(row or {})
        parsed = [self._parse(message, unread) for message in value]
        messages = [message for message, _ in parsed]
        learned = [number for number, (_, mark) in enumerate(parsed) if mark]
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError("holds nothing that the assistant says" if messages else "holds an empty list of messages")
        text, spans = self._render(messages, options)
        if not MARKERS.search(self.text):
            spans = [self._find_answer(messages, number, text, options) for number in learned]
        elif learned != answers:
            spans = self._select_spans(messages, learned, spans, options)
        if learned and not spans:
            raise ValueError("holds nothing that the assistant says")
        unread.update(self._find_unread(messages, text, options))
        return TextDocument(plain_text(text), spans=tuple(spans), unread=tuple(sorted(unread)))

    def _read_options(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        """What a row passes to the template besides its messages, and the columns that are not read."""
        options: dict[str, Any] = {}
        unread: set[str] = set()
        check_names(row)
        for name, value in sorted(row.items()):
            if value is None:
                continue
            if name not in OPTIONS or name != "chat_template_kwargs" and name not in self._words:
                unread.add(name)
            elif name == "enable_thinking":
                if options.setdefault(name, value) != value:
                    raise ValueError(f"has a column {name} that contradicts its chat_template_kwargs")
            elif (given := parse_text(value, name)) is None:
                continue
            elif name == "chat_template_kwargs":
                if not isinstance(given, dict) or not RESERVED.union(self.special).isdisjoint(given):
                    raise ValueError(
                        f"has {name} that are no mapping, or set a special token or one of "
                        f"{', '.join(sorted(RESERVED))}"
                    )
                options |= given
                unread.update(f"{name}.{key}" for key in given.keys() - self._words)
            else:
                items = [parse_text(one, name) for one in given] if isinstance(given, list) else [given]
                if not all(isinstance(one, dict) for one in items):
                    raise ValueError(f"has {name} that are not a list of mappings")
                options[name] = items
        return options, unread

    def _parse(self, message: dict[str, Any], unread: set[str]) -> tuple[dict[str, Any], bool]:
        """A message as the template expects it, and whether it is learned. Adds keys to `unread` that it drops."""
        given = {key: part for key, part in message.items() if part is not None}
        if "from" in given and "role" not in given:
            given = convert_sharegpt(given)
        role, content = given.get("role"), given.get("content")
        calls = parse_text(given.pop("tool_calls", None), "tool_calls")
        if not isinstance(role, str):
            raise ValueError(f"holds a message whose role is {shorten_foreign(role)}")
        if role not in ROLES | self._quoted:
            raise ValueError(
                f"holds a message whose role is {shorten_foreign(role)}; legal: {', '.join(sorted(ROLES))}, and roles "
                "that the chat template names"
            )
        learned = take_mark(given, role)
        if content is None and calls in (None, []) or not isinstance(content, (str, list, type(None))):
            raise ValueError(f"holds a message whose content is {shorten_foreign(content)} instead of text")
        if isinstance(content, list):
            content = [parse_part(part, unread) for part in content]
        if isinstance(content, str) and not self.takes_text:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self.takes_parts:
            content = "".join(part["text"] for part in content)
        given |= self.no_content if content is None else {"content": content}
        if calls not in (None, []):
            if "tool_calls" not in self._words:
                raise ValueError("holds a message with tool_calls, which the chat template does not read")
            given["tool_calls"] = self._convert_calls(calls)
        reasoning = next((given[key] for key in REASONING if key in given), None)
        if reasoning is not None and not self._words.isdisjoint(REASONING):
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        return given, learned

    def _convert_calls(self, calls: Any) -> list[dict[str, Any]]:
        """Tool calls as {type, function: {name, arguments}}, with arguments as the template expects them."""
        made = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"holds a tool call that is {shorten_foreign(call)} without a function's name")
            if (given := function.get("arguments")) is not None:
                parsed = parse_text("{}" if given == "" else given, "arguments of a tool call")
                if not isinstance(parsed, dict):
                    raise ValueError(f"holds arguments of a tool call that are {shorten_foreign(parsed)}, no mapping")
                if not self.takes_mapping:
                    parsed = given if given and isinstance(given, str) else json.dumps(parsed, ensure_ascii=False)
                function = {**function, "arguments": parsed}
            made.append({"type": "function", **(call if "function" in call else {}), "function": function})
        return made

    def _find_answer(
        self, messages: list[dict[str, Any]], number: int, whole: str, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        """What comes behind the prompt for one of the assistant's messages, up to the end of that message."""
        through, _ = self._render(messages[: number + 1], options)
        if number:
            before, _ = self._render(messages[:number], options, prompt=True)
        else:
            before = self._find_header(through, options)
        if not (through.startswith(before) and whole.startswith(through)):
            raise ValueError(
                "the chat template renders the beginning of a conversation otherwise than the whole of it, so that the "
                "assistant's part cannot be told; name one with {% generation %} markers by data.chat_template"
            )
        return len(before), len(through)

    def _find_header(self, through: str, options: Mapping[str, Any]) -> str:
        """What stands before an answer with which a conversation begins. Many templates cannot render a prompt without
        messages: then it is up to what they put before other answers."""
        try:
            before, _ = self._render([], options, prompt=True)
            if through.startswith(before):
                return before
        except ValueError:
            pass
        (asked, _), (prompt, _) = (self._render(PROBE[:1], options, prompt=given) for given in (False, True))
        header = prompt.removeprefix(asked)
        if header not in through or header in ("", prompt):
            raise ValueError("begins with the assistant, and the chat template does not tell where its answer begins")
        return through[: through.index(header) + len(header)]

    def _select_spans(
        self,
        messages: list[dict[str, Any]],
        learned: list[int],
        spans: list[tuple[int, int]],
        options: Mapping[str, Any],
    ) -> list[tuple[int, int]]:
        """The marked spans of the messages that are learned. A word that is put into one message at a time tells which
        spans are of it. Raises `ValueError` for spans of several messages, or of none that can be told."""
        owners: list[set[int]] = [set() for _ in spans]
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                text, marked = self._render(
                    [*messages[:number], add_sentinel(message), *messages[number + 1 :]], options
                )
                for owner, (first, last) in zip(owners, marked):
                    if SENTINEL in text[first:last] or len(marked) != len(spans):
                        owner.add(number)
        if not all(owner and (owner <= set(learned) or owner.isdisjoint(learned)) for owner in owners):
            raise ValueError("has answers that are not learned, and the chat template does not mark answers one by one")
        return [span for span, owner in zip(spans, owners) if owner <= set(learned)]

    def _find_unread(self, messages: list[dict[str, Any]], text: str, options: Mapping[str, Any]) -> set[str]:
        """Roles and keys of messages, and tools and documents, without which the template renders the same. Each is
        tried in `TRIED` rows, or until it is read once."""
        known = {"role", "content", "tool_calls", *(() if self._words.isdisjoint(REASONING) else REASONING)}
        found = {("key", key) for one in messages for key in one.keys() - known}
        found |= {("role", one["role"]) for one in messages if one["role"] != "assistant" and one.get("content")}
        found |= {("option", name) for name in ("tools", "documents") if options.get(name)}
        unread = set()
        for kind, name in found:
            shown = {"key": f"messages[].{name}", "role": f"messages of role {name}", "option": name}[kind]
            if not self._reads.get(shown) and self._tried[shown] < TRIED:
                self._tried[shown] += 1
                kept = [one for one in messages if kind != "role" or one["role"] != name]
                kept = [{key: one[key] for key in one if kind != "key" or key != name} for one in kept]
                others = {key: options[key] for key in options if kind != "option" or key != name}
                try:
                    self._reads[shown] = self._render(kept, others)[0] != text
                except ValueError:
                    self._reads[shown] = True
            if not self._reads[shown]:
                unread.add(shown)
        return unread


def check_names(columns: Iterable[str]) -> None:
    """Raises `ValueError` for a column beside conversations that seems to say what is learned: none is known."""
    if unknown := next(filter(CONTROL.match, columns), None):
        raise ValueError(
            f"has a column {on_one_line(unknown)}, which seems to say what is learned and is not known; mark "
            f"messages by one of {', '.join(MARKS)}, and remove the column"
        )


def convert_sharegpt(given: dict[str, Any]) -> dict[str, Any]:
    """A {from, value} message as {role, content}. A function_call holds the JSON text of a call or of several."""
    role, value = given.pop("from"), given.pop("value", None)
    if role == "function_call":
        calls = parse_text(value, "value of function_call")
        return {"role": "assistant", "tool_calls": calls, **given}
    return {"role": SHAREGPT.get(role, role) if isinstance(role, str) else role, "content": value, **given}


def take_mark(given: dict[str, Any], role: str) -> bool:
    """Removes the keys from a message that say whether it is learned, and returns what they say."""
    marks = {key: given.pop(key) for key in MARKS if key in given}
    if unknown := next((key for key in given if CONTROL.search(key)), None):
        raise ValueError(
            f"holds a message with {on_one_line(unknown)}, which seems to say what is learned and is not known; known "
            f"are {', '.join(MARKS)}; remove it"
        )
    for key, mark in marks.items():
        if not isinstance(mark, (bool, int, float)) or mark not in (0, 1):
            raise ValueError(f"holds a message with {key}={shorten_foreign(mark)}; legal: 0 and 1, or false and true")
        if mark and role != "assistant":
            raise ValueError(
                f"holds a message of role {shorten_foreign(role)} that is to be learned ({key}={mark}); only the "
                "assistant's messages are learned; remove that key"
            )
    if len({bool(mark) for mark in marks.values()}) > 1:
        raise ValueError(f"holds a message in which {' and '.join(marks)} contradict each other")
    return role == "assistant" and all(marks.values())


def parse_part(part: Any, unread: set[str]) -> dict[str, Any]:
    """A part of a message's content, which is {type: text, text}. Adds its other keys to `unread`."""
    kind = part.get("type") if isinstance(part, dict) else part
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"holds a message with a part {shorten_foreign(kind)} that is no text, which is all that is read"
        )
    unread.update(
        f"messages[].content[].{key}" for key, item in part.items() if key not in ("type", "text", None) and item
    )
    return {"type": "text", "text": part["text"]}


def parse_text(value: Any, named: str) -> Any:
    """A value, or what it says as JSON text; None for an empty text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, exact=True) if value.strip() else None
    except ValueError as error:
        raise ValueError(f"has {named} that are no JSON ({shorten_foreign(error)})") from None


def add_sentinel(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message that says `SENTINEL` besides, wherever it says something."""
    content, made = message.get("content"), dict(message)
    if isinstance(content, list):
        made["content"] = [*content, {"type": "text", "text": SENTINEL}]
    elif content or "tool_calls" not in message:
        made["content"] = (content or "") + SENTINEL
    if "tool_calls" in message:
        calls = json.loads(json.dumps(message["tool_calls"]))
        for call in calls:
            function = call.get("function", call)
            function["name"] = f"{function.get('name')}{SENTINEL}"
        made["tool_calls"] = calls
    return made


class PackedConversations(PackedSequences):
    """The conversations of several runs, packed whole into sequences with random access.

    A conversation is a document of its own. What it has beyond a sequence is cut off; `cut` counts those. What is left
    of a sequence is filled up with end marks, which are not learned. share: of the tokens of all sequences, those that
    are learned."""

    def __init__(self, name: str, runs: list[TokenRun], end_id: int, vocab_size: int, sequence_length: int):
        super().__init__(name, runs, end_id, vocab_size, sequence_length)
        starts = [np.flatnonzero(run.map_marks() & FIRST) for run in runs]
        lengths = [np.diff(first, append=run.length) for first, run in zip(starts, runs)]
        self._run = np.repeat(np.arange(len(runs)), [len(first) for first in starts])
        self._start, whole = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in (starts, lengths))
        self.cut = int((whole > sequence_length + 1).sum())
        self._length = np.minimum(whole, sequence_length + 1)
        self._order, self._ends = pack_lengths(self._length, sequence_length + 1)
        self.length = len(self._ends)
        learned = sum(
            count_learned(run.map_marks(), first, np.minimum(length, sequence_length + 1))
            for run, first, length in zip(runs, starts, lengths)
        )
        self.share = learned / (self.length * sequence_length) if self.length else 0.0

    def _get(self, index: int) -> TokenSample:
        members = self._order[self._ends[index - 1] if index else 0 : self._ends[index]]
        tokens, learned = np.full(self.size + 1, self.end_id, np.int64), np.zeros(self.size + 1, bool)
        documents, filled = np.full(self.size + 1, len(members), np.int32), 0
        for number, member in enumerate(members):
            run, start, length = self.runs[self._run[member]], int(self._start[member]), int(self._length[member])
            ids, marks = (shared_map(self, run, what)[start : start + length] for what in ("tokens", "marks"))
            place = slice(filled, filled := filled + length)
            tokens[place], learned[place], documents[place] = ids, marks & LEARNED > 0, number
        check_vocabulary(tokens, self.vocab_size, f"{self.name}:{index}")
        return TokenSample(tokens, documents, learned)


def count_learned(marks: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
    """The number of learned tokens of conversations that begin at `starts` and are cut off after `lengths` tokens. The
    first token of a conversation follows nothing, so it is not learned."""
    learned = np.append(marks & LEARNED > 0, False)
    bounds = np.stack([starts + 1, starts + lengths], 1)[lengths > 1]
    return int(np.add.reduceat(learned, bounds.ravel(), dtype=np.int64)[::2].sum()) if len(bounds) else 0


def pack_lengths(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pieces of `lengths` (at most `room` each) share a sequence of `room`: the longest first, each where it
    leaves the least (best fit decreasing; Johnson 1973, which needs at most 11/9 of the fewest sequences).

    Returns the pieces' numbers, sequence by sequence, and where among them each sequence ends; int64."""
    sequences: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    rooms = 0  # bit r: whether a sequence has room for r
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        if fitting := rooms >> length:
            found = length + (fitting & -fitting).bit_length() - 1
            sequence = with_room[found].pop()
            rooms ^= (not with_room[found]) << found
        else:
            found, sequence = room, len(sequences)
            sequences.append([])
        sequences[sequence].append(piece)
        if left := found - length:
            with_room[left].append(sequence)
            rooms |= 1 << left
    order = np.array([piece for sequence in sequences for piece in sequence], np.int64)
    return order, np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
