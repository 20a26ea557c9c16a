"""Text to token ids and back: trained byte-level BPE, plain bytes, or a tokenizer from a file or folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from trainer.config import ConfigError
from trainer.hf.tokenizer import LIMIT, drop_lengths, open_tokenizer, save_tokenizer, write_config
from trainer.util.reading import read_bytes, shorten_foreign

END = "<|endoftext|>"
"""The end-of-text token (end mark) of tokenizers made here."""

KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|endofdocument|>", "<|im_end|>", "[EOS]", "[SEP]")
"""Names under which a bare tokenizer.json, which has no field for it, may hold its end mark."""


class Tokenizer:
    """A `tokenizers` tokenizer with an end-of-text token (EOS; here: the end mark), which closes every document.

    `digest` identifies how it encodes text. Text never becomes special tokens: a document that spells out the end
    mark's name keeps it as text. `original` is the transformers tokenizer that it was made from, or None; `save` keeps
    all settings of an `original`. chat_template: the text of the Jinja template of conversations, or None.
    unknown_id: the token that stands for what the vocabulary lacks, or None. notes: what is to be said of the files
    that it was made from."""

    def __init__(self, backend: Backend, end_id: int, original: Any = None, notes: Iterable[str] = ()):
        self.backend, self.end_id, self._original, self.notes = backend, end_id, original, list(notes)
        found = getattr(original, "chat_template", None)
        self.chat_template: str | None = found.get("default") if isinstance(found, dict) else found
        backend.encode_special_tokens = True
        drop_lengths(backend)
        self.vocab_size = max(backend.get_vocab().values()) + 1
        state = json.loads(backend.to_str())
        unknown = state["model"].get("unk_token")
        self.unknown_id: int | None = backend.token_to_id(unknown) if unknown else state["model"].get("unk_id")
        del state["post_processor"]  # it only adds special tokens
        self.digest = hashlib.blake2b(json.dumps([end_id, state], sort_keys=True).encode(), digest_size=16).hexdigest()

    def __reduce__(self) -> tuple:
        return type(self), (self.backend, self.end_id)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use, such as eos_token."""
        if self._original is None:
            return {"eos_token": self.backend.id_to_token(self.end_id)}
        return {name: token for name, token in self._original.special_tokens_map.items() if isinstance(token, str)}

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of special tokens."""
        return {number for number, token in self.backend.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any mark added at its start or end."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, by as many threads as `tokenizers` is allowed to use (TOKENIZERS_PARALLELISM)."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_special(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """The ids of each text, in which names of special tokens are these tokens, and where in the text each one
        begins and ends, int [tokens, 2]."""
        encodings = self._special_backend.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)) for encoding in encodings]

    @cached_property
    def _special_backend(self) -> Backend:
        state = json.loads(self.backend.to_str())
        # Of what is encoded without special tokens it changes the offsets alone: with trim_offsets those of a token
        # leave out its blanks, so that a token of blanks lies nowhere.
        state["post_processor"] = None
        backend = Backend.from_str(json.dumps(state))
        backend.encode_special_tokens = False
        return backend

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; the end mark is left out, and bytes that are no UTF-8 become replacement characters."""
        return self.backend.decode([int(token) for token in ids if token != self.end_id], skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        """Writes a folder that `transformers.AutoTokenizer.from_pretrained` opens.

        A tokenizer without an `original` is written without importing transformers, which would cost every run's start
        a second."""
        if self._original is not None:
            if self.chat_template is not None:
                self._original.chat_template = self.chat_template
            save_tokenizer(self._original, Path(folder))
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        described = {"eos_token": self.backend.id_to_token(self.end_id), "clean_up_tokenization_spaces": False} | (
            {"chat_template": self.chat_template} if self.chat_template else {}
        )
        write_config(folder, described, self.backend)


class ByteTokenizer(Tokenizer):
    """Token i is byte i, which needs no search for merges."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def byte_tokenizer() -> ByteTokenizer:
    """The 256 bytes and an end mark, 256. Its file is a byte-level BPE without merges, so everything opens it."""
    backend = Backend(
        models.BPE(vocab={character: byte for byte, character in enumerate(_byte_characters())}, merges=[])
    )
    _byte_level(backend)
    backend.add_special_tokens([AddedToken(END, special=True)])
    return ByteTokenizer(backend, 256)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (Radford et al., GPT-2) of at most `vocab_size` tokens, at least the 256 bytes and the end
    mark."""
    backend = Backend(models.BPE())
    _byte_level(backend)
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return Tokenizer(backend, backend.token_to_id(END))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer from a tokenizer.json or a transformers tokenizer folder. Raises `ConfigError`."""
    path = Path(path).expanduser()
    named = f"data.tokenizer={path}"
    if path.is_dir():
        return _from_folder(path, named)
    if not path.is_file():
        raise ConfigError(
            f"{named} does not exist; legal: bpe, bytes, a tokenizer.json, or a transformers tokenizer folder (one of "
            "the hub: hf download NAME --include 'tokenizer*' --local-dir DIR)"
        )
    try:
        backend = Backend.from_str(read_bytes(path, LIMIT).decode())
    except BaseException as error:  # tokenizers raises plain Exception, and for a panic in Rust not even that
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(
            f"{named} is not a tokenizer.json: {shorten_foreign(error)}; write it anew, or name another"
        ) from error
    return _made(named, backend, None, notes=drop_lengths(backend))


def _find_end(named: str, backend: Backend) -> tuple[int, list[str]]:
    """The end mark of a tokenizer.json, which has no field for it, and what is to be said of it.

    It is a special token: the one that the post-processor ends texts with, or else the first of `KNOWN_ENDS`. An
    ordinary token is taken only where there is no special one."""
    special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    found = [end for end in map(backend.token_to_id, KNOWN_ENDS) if end is not None]
    whole, plain = (backend.encode("a", add_special_tokens=added).ids[-1:] for added in (True, False))
    last = [end for end in whole if whole != plain and end in special]
    ends = [*last, *(end for end in found if end in special)] or found
    if not ends:
        raise ConfigError(
            f"{named} has none of the end marks {', '.join(KNOWN_ENDS)}; name a transformers tokenizer folder whose "
            "tokenizer_config.json has an eos_token"
        )
    name, *others = (shorten_foreign(backend.id_to_token(end)) for end in dict.fromkeys([*ends, *found]))
    if not others and ends[0] in special:
        return ends[0], []
    kind = "special" if ends[0] in special else "ordinary"
    told = f" (others: {', '.join(others)})" if others else ""
    return ends[0], [
        f"the end mark is the {kind} token {name}{told}; the eos_token of a transformers tokenizer folder names another"
    ]


def _made(
    named: str, backend: Backend, end_id: int | None, original: Any = None, notes: Iterable[str] = ()
) -> Tokenizer:
    """The tokenizer, if it can encode: a file may be well-formed, and its parts not fit each other. end_id: None to
    find the end mark."""
    try:
        if end_id is None:
            end_id, more = _find_end(named, backend)
            notes = [*notes, *more]
        tokenizer = Tokenizer(backend, end_id, original, [f"{named}: {note}" for note in notes])
        tokenizer.decode(tokenizer.encode("Words, 1 2 3\n\tä €"))
    except ConfigError:
        raise
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(
            f"{named} cannot encode text: {shorten_foreign(error)}; write it anew, or name another"
        ) from error
    return tokenizer


def _from_folder(path: Path, named: str) -> Tokenizer:
    try:
        original, notes = open_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer={error}") from error
    backend = getattr(original, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"{named} is a {type(original).__name__} without a tokenizer.json; save it as a fast tokenizer first"
        )
    if original.eos_token_id is None:
        raise ConfigError(f"{named} has no end mark; set eos_token in its tokenizer_config.json")
    return _made(named, backend, original.eos_token_id, original, notes)


def _byte_level(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers (GPT-2's bytes_to_unicode) write for each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
