"""Tokenizer folders of transformers, and their chat templates. No code that comes with a folder is run, and no file
outside it is opened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from tokenizers import Tokenizer as Backend

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


def open_tokenizer(folder: Path) -> tuple[Any, list[str]]:
    """The transformers tokenizer in `folder`, and what is to be said of it.

    It encodes text as the folder's tokenizer.json does. transformers 5 rebuilds the tokenizers of many classes from
    their vocabulary, with the pre-tokenizer of the class. Raises `Malformed` for whatever keeps it from being opened,
    such as a link or a value in one of its files that leads out of the folder."""
    from transformers import AutoTokenizer

    refused = None
    try:
        check_files(folder)
        named = {key: path for name in CONFIGS for key, path in named_files(folder, name).items()}
        try:
            opened = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **named)
        except Exception as error:
            opened, refused = None, error
        file = find_tokenizer_file(folder)
        if refused and (file is None or "trust_remote_code" in str(refused)):
            raise refused
        return follow_file(folder, file, opened, named) if file else (opened, find_contradictions(folder))
    except BaseException as error:  # whatever the tokenizer's own class raises; a panic in Rust is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        error = refused or error
        reason = str(error) if isinstance(error, ConfigError) else shorten_foreign(error)
        if "trust_remote_code" in str(error):
            reason = (
                "it brings code of its own (auto_map), which is never run; save it as a tokenizer of transformers' "
                "own classes"
            )
        elif not isinstance(error, (ConfigError, PermissionError)):
            names = sorted(path.name for path in folder.iterdir())
            if not any(re.search(r"tokenizer\.json|vocab|\.model$|tiktoken", name) for name in names):
                held = ", ".join(names[:5]) or "nothing"
                reason = f"it holds {held}, and no vocabulary such as tokenizer.json; save a tokenizer into it"
        raise Malformed(f"{folder} is not a transformers tokenizer folder: {reason}") from error


def find_tokenizer_file(folder: Path) -> Path | None:
    """The file of the `tokenizers` library in `folder` that the installed transformers reads, if there is one."""
    from transformers.tokenization_utils_base import get_fast_tokenizer_file

    versions = read_config(folder, "tokenizer_config.json").get("fast_tokenizer_files", [])
    path = folder / get_fast_tokenizer_file(versions)
    return path if path.is_file() else None


def follow_file(folder: Path, file: Path, opened: Any, named: dict[str, str]) -> tuple[Any, list[str]]:
    """`opened`, or, where it is None or makes other tokens than `file`, a tokenizer that makes the same; and what is to
    be said of it. named: files by the arguments of transformers that take them."""
    import transformers

    backend = Backend.from_file(str(file))
    notes = [*drop_lengths(backend), *find_contradictions(folder, backend)]
    theirs, made = getattr(opened, "backend_tokenizer", None), None
    texts = generate_texts([token.content for token in backend.get_added_tokens_decoder().values()])
    if theirs is not None:
        drop_lengths(theirs)
        with contextlib.suppress(Exception):  # a class may build what cannot encode a text of this vocabulary
            made = encode_all(theirs, texts)
    if made != encode_all(backend, texts):
        known = getattr(opened, "special_tokens_map", {})
        options = {name: token for name, token in known.items() if backend.token_to_id(str(token)) is not None}
        options[PREFIX] = any(prefix_space_settings(backend))
        extra = read_config(folder, "tokenizer_config.json").get("extra_special_tokens")
        if isinstance(extra, list):  # as transformers 5 writes it, and transformers 4 cannot read it
            options |= {"extra_special_tokens": {}, "additional_special_tokens": extra}
        followed = transformers.PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **{**options, **named}
        )
        drop_lengths(followed.backend_tokenizer)
        if made != encode_all(followed.backend_tokenizer, texts):  # else tokenizer_config.json adds tokens to the file
            does = f"makes other tokens, as {type(opened).__name__}" if opened is not None else "cannot open it"
            notes.append(
                f"AutoTokenizer of transformers {transformers.__version__} {does}; {file.name} is used as it is, as "
                "PreTrainedTokenizerFast.from_pretrained does"
            )
            opened = followed
    if len(opened) > backend.get_vocab_size():
        added = sorted(set(opened.get_vocab()) - set(backend.get_vocab()))
        names = ", ".join(map(shorten_foreign, added[:5])) + ", ..." * (len(added) > 5)
        notes.append(f"other files of the folder, or the class, add tokens that {file.name} lacks: {names}")
    return opened, notes


FRAGMENTS = (
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b"),
    *"hello World UPPER it's I'LL 'd 0 12 345 678901 3.14 1,000 ! ... _ - # f(x)= {} </ < > |".split(),
    *"e\u0301 \u00e9 \ufb01 \u212b \u2460 na\u00efve \u0130 \u00df \u4e2d\u6587 \u65e5\u672c".split(),
    *"\ud55c\uae00 \u0e44\u0e17\u0e22 \u0939\u093f".split(),
    *("\u0639\u0631", "\U0001f600", "\U0001f469\u200d\U0001f467"),
)
"""What texts are generated of in which two tokenizers may differ."""


def generate_texts(names: list[str]) -> list[str]:
    """Texts of blanks, words, numbers, scripts and symbols, and of the names of special tokens; always the same."""
    draw = random.Random(0)
    return ["".join(draw.choices((*FRAGMENTS, *names[:8], *names[-2:]), k=12)) for _ in range(96)]


def encode_all(backend: Backend, texts: list[str]) -> list[tuple[list[int], str]]:
    """The ids of each text and the text that they decode to: with special tokens as text, then as what they are and
    with those that are added to each text."""
    kept, found = backend.encode_special_tokens, []
    for plain in (True, False):
        backend.encode_special_tokens = plain
        # One by one: after a batch, which takes threads, `tokenizers` warns in every process that is forked.
        for encoding in (backend.encode(text, add_special_tokens=not plain) for text in texts):
            found.append((encoding.ids, backend.decode(encoding.ids, skip_special_tokens=False)))
    backend.encode_special_tokens = kept
    return found


def drop_lengths(backend: Backend) -> list[str]:
    """Makes a tokenizer encode each text whole and no longer than it is, as transformers does unless it is asked for
    truncation or padding. Returns what is to be said of it."""
    dropped = [f"truncation to {backend.truncation['max_length']} tokens"] if backend.truncation else []
    dropped += ["padding"] if backend.padding else []
    backend.no_truncation()
    backend.no_padding()
    return [f"not applied, because documents are tokenised whole: {', '.join(dropped)}"] if dropped else []


def prefix_space_settings(backend: Backend) -> set[bool]:
    """The values of add_prefix_space in the pre-tokenizer of a tokenizer, and in the parts of one."""
    state = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {}
    return {value for place, value in list_leaves(state) if place.split(".")[-1] == PREFIX}


PREFIX = "add_prefix_space"
"""A setting of a pre-tokenizer. transformers 4 changes it to that of tokenizer_config.json unless it is in a part."""


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """The content of a file of settings of the tokenizer in `folder`; empty where there is none."""
    if not (folder / name).is_file():
        return {}
    return read_json(folder / name, dict, "write it anew with transformers' save_pretrained", LIMIT)


def find_contradictions(folder: Path, backend: Backend | None = None) -> list[str]:
    """Where the files of a tokenizer say different things, and which of them is used. backend: its tokenizer.json."""
    described, mapped = (read_config(folder, name) for name in CONFIGS[:2])
    listed = described.get("added_tokens_decoder", {})
    # transformers reads special_tokens_map.json only where tokenizer_config.json does not list the tokens.
    taken, left = CONFIGS[:2] if "added_tokens_decoder" in described else CONFIGS[1::-1]
    notes = [
        f"{taken} and {left} name different tokens as {name}; that of {taken} is used"
        for name in sorted({*described} & {*mapped})
        if name.endswith("_token") and token_text(described[name]) != token_text(mapped[name])
    ]
    if backend is None:
        return notes
    ids = {token_text(token): id for id, token in listed.items()} if isinstance(listed, dict) else {}
    wrong = [token for token, id in ids.items() if str(backend.token_to_id(str(token))) not in (str(id), "None")]
    if wrong:
        notes.append(f"{CONFIGS[0]} gives {shorten_foreign(wrong[0])} another id than tokenizer.json, whose is used")
    spaces, wanted = prefix_space_settings(backend), described.get(PREFIX)
    if spaces and isinstance(wanted, bool) and wanted not in spaces:
        notes.append(f"{CONFIGS[0]} has {PREFIX}={str(wanted).lower()}, tokenizer.json the opposite, which is used")
    return notes


def token_text(value: Any) -> Any:
    """The text of a token in a file, which may have settings beside it."""
    return value.get("content") if isinstance(value, dict) else value


REBUILT = ("qwen2",)
"""Model types whose tokenizers transformers 5 rebuilds from the vocabulary whichever class tokenizer_config.json names.
A test opens exports of every family with the installed transformers."""


def save_tokenizer(opened: Any, folder: Path, model_type: str | None = None) -> None:
    """Writes a folder that transformers 4 and 5 open with equal ids. model_type: that of the model beside it."""
    opened.save_pretrained(str(folder))
    if getattr(opened, "backend_tokenizer", None) is None:
        return
    described = read_config(folder, CONFIGS[0])
    for name in ("special_tokens_map.json", "added_tokens.json"):  # the other two files say it all
        (folder / name).unlink(missing_ok=True)
    for name in ("is_local", "local_files_only"):  # how it was opened here
        described.pop(name, None)
    # transformers 4 takes tokens without a name in additional_special_tokens only, and tokens with a name that is not
    # among the usual ones in extra_special_tokens only. transformers 5 reads both.
    if isinstance(extra := described.pop("extra_special_tokens", None), list):
        described["additional_special_tokens"] = extra
    if named := described.pop("model_specific_special_tokens", extra if isinstance(extra, dict) else None):
        described["extra_special_tokens"] = named
    write_config(folder, described, opened.backend_tokenizer, model_type)


def write_config(folder: Path, described: dict[str, Any], backend: Backend, model_type: str | None = None) -> None:
    """Writes tokenizer_config.json such that transformers 4 and 5 use the tokenizer.json beside it as it is."""
    described = {**described, "tokenizer_class": "PreTrainedTokenizerFast", PREFIX: any(prefix_space_settings(backend))}
    if model_type in REBUILT:
        # In this file the key allows no code; that takes the argument of from_pretrained. transformers 5 passes it to
        # the function that rebuilds, which then does not. The class would add default tokens instead of those that are
        # left out.
        described = {"bos_token": None, "unk_token": None, "pad_token": None, **described, "trust_remote_code": True}
    (folder / CONFIGS[0]).write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n")


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
    content = read_config(folder, name)
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
    opened, _ = open_tokenizer(folder)
    if read_marks(opened.backend_tokenizer)[0] == ids:
        return
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    set_begin(backend, ids)
    backend.save(str(folder / "tokenizer.json"))
    # Classes that make the post-processor anew do so from this key, or from its default.
    described = read_config(folder, CONFIGS[0]) | {"add_bos_token": ids == [opened.bos_token_id]}
    write_config(folder, described, backend)


# Chat templates: transformers renders them, in Jinja's sandbox. A template is data that somebody else wrote.


MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Before what the assistant says, in templates that mark it."""


def render_chat(
    template: str, messages: list[dict[str, Any]], special: dict[str, Any], prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the spans of characters that the template marks as the assistant's.

    special: what else the template is given: special tokens by name, such as eos_token; tools, documents and further
    arguments of transformers' apply_chat_template. prompt: ends with what stands before an answer. Raises `ValueError`
    for whatever the template raises."""
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
        raise ValueError(f"the chat template fails: {shorten_foreign(error)}") from error
    return texts[0], [(start, end) for start, end in spans[0]] if spans else []
