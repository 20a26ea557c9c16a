"""Tokenizer folders of transformers, and their chat templates. No code that comes with a folder is run, and no file
outside it is opened."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from trainer.config import ConfigError
from trainer.util.reading import Malformed, check_links, on_one_line, path_inside, read_json, shorten_foreign

LIMIT = 256 << 20
"""Bytes of a file that belongs to a tokenizer; the largest that are published have some 40 MiB."""

SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Files of a folder that transformers reads to make a tokenizer."""

TEMPLATES = "additional_chat_templates"
"""The folder of chat templates beside the default one."""

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
"""Files whose values transformers passes to the class of a tokenizer, or that name further files to read."""

FILE = re.compile(r"(^|[_.])(vocab|merges|files?|paths?|dir|spm|model|codes|object|inputs)$|(files|inputs)\[\d+\]$")
"""Keys under which classes of tokenizers take the name of a file. They open it wherever it leads, and a relative one
from the current folder. A test compares the pattern with the installed classes."""

NEVER_OPENED = re.compile(r"^(\w*tokens?|\w*_decoder|chat_template|_?name_or_path|special_tokens_map_file)\b")
"""Keys whose texts are tokens, templates, or notes that transformers replaces by the folder that it opens."""


def open_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in `folder`. Raises `Malformed` for whatever keeps it from being opened, such as a
    link or a value in one of its files that leads out of the folder."""
    from transformers import AutoTokenizer

    try:
        check_files(folder)
        named = {key: path for name in CONFIGS for key, path in named_files(folder, name).items()}
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **named)
    except BaseException as error:  # whatever the tokenizer's own class raises; a panic in Rust is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        reason = str(error) if isinstance(error, ConfigError) else shorten_foreign(error)
        if "trust_remote_code" in str(error):
            reason = (
                "it brings code of its own (auto_map), which is never run; save it as a tokenizer of transformers' "
                "own classes"
            )
        raise Malformed(f"{folder} is not a transformers tokenizer folder: {reason}") from error


def check_files(folder: Path) -> None:
    """Raises `ConfigError` for links out of the folder, and for files of a tokenizer that are too large or no files."""
    check_links(folder)
    if (folder / TEMPLATES).is_dir():
        check_links(folder / TEMPLATES)
    for path in folder.iterdir():
        if path.suffix in SUFFIXES and (not path.is_file() or os.path.getsize(path) > LIMIT):
            raise ConfigError(f"{path.name} is no file of at most {LIMIT} bytes")


def named_files(folder: Path, name: str) -> dict[str, str]:
    """The files in `folder` that its file `name`, one of `CONFIGS`, names for the class of the tokenizer: key ->
    absolute path. Raises `ConfigError` for a value that names a file elsewhere."""
    if not (folder / name).is_file():
        return {}
    content = read_json(folder / name, dict, "write it anew with transformers' save_pretrained", LIMIT)
    if name == "config.json":  # transformers opens nothing else that it names
        content = {key: value for key, value in content.items() if key == "configuration_files"}
    found = {}
    for place, value in list_leaves(content):
        if NEVER_OPENED.search(place):
            continue
        if FILE.search(place):
            try:
                path = path_inside(folder, value if isinstance(value, str) else "")
            except ValueError:
                path = folder
            if not path.is_file():
                raise ConfigError(
                    f"{name} has {on_one_line(place)}={shorten_foreign(value)}, which names no file in its "
                    "folder; remove that "
                    "key, transformers finds the files of a tokenizer by their usual names"
                )
            if place in content:
                found[place] = str(path.absolute())
        elif isinstance(value, str) and (PurePath(value).is_absolute() or ".." in PurePath(value).parts):
            raise ConfigError(
                f"{name} has {on_one_line(place)}={shorten_foreign(value)}, which leads out of its folder; "
                "remove that key"
            )
    return found


def list_leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """What a parsed file holds besides mappings, lists and nulls, each with its place: `a.b`, or `a[0]` in a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from list_leaves(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from list_leaves(item, f"{place}[{index}]")
    elif value is not None:
        yield place, value


# What a tokenizer's post-processor puts before and behind every text: BOS, EOS, or neither.


def read_marks(backend: Any) -> tuple[list[int], list[int]]:
    """The ids that the post-processor of a `tokenizers` tokenizer puts before and behind a text."""
    encoding = backend.encode("Words, 1 2 3", add_special_tokens=True)
    own = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    return (encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]) if own else ([], [])


def set_begin(backend: Any, ids: list[int]) -> None:
    """Makes a `tokenizers` tokenizer begin every text with `ids`. What it puts behind a text stays."""
    from tokenizers import processors

    end = read_marks(backend)[1]
    single, pair = (
        [piece for text in texts for piece in [*map(str, ids), text, *map(str, end)]]
        for texts in (["$A"], ["$A", "$B:1"])
    )
    marks = [{"id": str(token), "ids": [token], "tokens": [backend.id_to_token(token)]} for token in {*ids, *end}]
    adds = processors.TemplateProcessing(single=single, pair=pair, special_tokens=marks)
    # A byte-level tokenizer's own step, which trims offsets, stays before it.
    steps = [backend.post_processor] if isinstance(backend.post_processor, processors.ByteLevel) else []
    backend.post_processor = processors.Sequence([*steps, adds]) if steps else adds


def rewrite_begin(folder: Path, ids: list[int]) -> None:
    """Makes the tokenizer that transformers opens in `folder`, which has a tokenizer.json, begin every text with
    `ids`. Nothing is written where it does so already."""
    from tokenizers import Tokenizer

    opened = open_tokenizer(folder)
    if read_marks(opened.backend_tokenizer)[0] == ids:
        return
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    set_begin(backend, ids)
    backend.save(str(folder / "tokenizer.json"))
    # Other classes make the post-processor anew, from this key, or from its default.
    path = folder / "tokenizer_config.json"
    described = read_json(path, dict, "write it anew with transformers' save_pretrained", LIMIT)
    described |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": ids == [opened.bos_token_id]}
    path.write_text(json.dumps(described, indent=2) + "\n")


# Chat templates: transformers renders them, in Jinja's sandbox. A template is data that somebody else wrote.


MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Before what the assistant says, in templates that mark it."""


def render_chat(
    template: str, messages: list[dict[str, Any]], special: dict[str, str], prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the spans of characters that the template marks as the assistant's.

    special: special tokens by name, such as eos_token. prompt: ends with what stands before an answer. Raises
    `ValueError` for whatever the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=bool(MARKERS.search(template)),
            add_generation_prompt=prompt,
            **special,
        )
    except Exception as error:  # anything that code of others runs into
        raise ValueError(f"the chat template fails: {error}") from error
    return texts[0], [(start, end) for start, end in spans[0]] if spans else []
