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
from trainer.hf.tokenizer import (
    LIMIT,
    drop_lengths,
    open_tokenizer,
    read_marks,
    render_chat,
    rewrite_begin,
    save_tokenizer,
    set_begin,
    write_config,
)
from trainer.util.reading import read_bytes, shorten_foreign

END = "<|endoftext|>"
"""The end-of-text token (end mark) of tokenizers made here."""

KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|endofdocument|>", "<|im_end|>", "[EOS]", "[SEP]")
"""Names under which a bare tokenizer.json, which has no field for it, may hold its end mark."""


PROBE = "1b2d3"
"""What is said in conversations that are rendered to see how a template ends a message."""


class Tokenizer:
    """A `tokenizers` tokenizer with an end-of-text token (EOS; here: the end mark), which closes every document.

    `digest` identifies how it encodes documents. Text never becomes special tokens: a document that spells out the end
    mark's name keeps it as text. `original` is the transformers tokenizer that it was made from, or None; `save` keeps
    all settings of an `original`. chat_template: the text of the Jinja template of conversations, or None. begin: the
    ids with which the post-processor begins every text, such as BOS; see `begin_with`. unknown_id: the token that
    stands for what the vocabulary lacks, or None. notes: what is to be said of the files that it was made from."""

    def __init__(self, backend: Backend, end_id: int, original: Any = None, notes: Iterable[str] = ()):
        self.backend, self.end_id, self._original, self.notes = backend, end_id, original, list(notes)
        self.begin = self._own_begin = read_marks(backend)[0]
        found = getattr(original, "chat_template", None)
        self.chat_template: str | None = found.get("default") if isinstance(found, dict) else found
        backend.encode_special_tokens = True
        drop_lengths(backend)
        self.vocab_size = max(backend.get_vocab().values()) + 1

    @cached_property
    def unknown_id(self) -> int | None:
        model = json.loads(self.backend.to_str())["model"]
        unknown = model.get("unk_token")
        return self.backend.token_to_id(unknown) if unknown else model.get("unk_id")

    @cached_property
    def digest(self) -> str:
        state = json.loads(self.backend.to_str())
        del state["post_processor"]  # it only adds special tokens
        # Tokenizers without BOS keep the digest that they had before documents began with it.
        parts = [self.end_id, state, *([self.document_begin] if self.document_begin else [])]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def document_begin(self) -> list[int]:
        """The ids that stand before every document in training data: `begin`, but no second end mark where the end mark
        of the document before is one of them."""
        return [] if self.end_id in self.begin else self.begin

    @property
    def bos_id(self) -> int | None:
        """The id of BOS: what `begin` is, or what the tokenizer's folder names as bos_token; None without one."""
        named = getattr(self._original, "bos_token_id", None)
        return self.begin[0] if named is None and len(self.begin) == 1 else named

    def begin_with(self, ids: list[int]) -> None:
        """Begins every text with `ids` from now on, here and in what is saved. Raises `ConfigError` for an id that the
        tokenizer does not have."""
        if ids != self.begin:
            if unknown := [token for token in ids if self.backend.id_to_token(token) is None]:
                raise ConfigError(
                    f"documents begin with token {unknown[0]}, which the tokenizer does not have; it is not the one "
                    "that the model was trained with"
                )
            set_begin(self.backend, ids)
            self.begin = ids
            self.__dict__.pop("digest", None)

    def name_tokens(self, ids: list[int]) -> str:
        """The tokens as their vocabulary writes them."""
        return "".join(self.backend.id_to_token(token) or str(token) for token in ids)

    def __reduce__(self) -> tuple:
        return type(self), (self.backend, self.end_id)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use, such as eos_token."""
        if self._original is None:
            return {"eos_token": self.name_tokens([self.end_id])} | (
                {"bos_token": self.name_tokens(self.begin)} if len(self.begin) == 1 else {}
            )
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

    def encode_prompt(self, text: str, chat: bool = False) -> list[int]:
        """The ids of a prompt, as transformers encodes it: names of special tokens are these tokens, and `begin` stands
        before it unless the text writes it. chat: `text` is what `render_prompt` returned, in which the template writes
        BOS or does not. Never empty: a prompt without any token begins a document."""
        [(ids, _)] = self.encode_special([text])
        if not chat and ids[: len(self.begin)] != self.begin:
            ids = [*self.begin, *ids]
        return ids or [self.end_id]

    def render_prompt(self, text: str) -> str:
        """A user's message as the chat template writes it, up to where the answer begins. Raises `ConfigError` where
        there is no template, or it fails."""
        try:
            if self.chat_template is None:
                raise ValueError("the tokenizer has no chat template")
            return render_chat(self.chat_template, [{"role": "user", "content": text}], self.special_tokens, True)[0]
        except ValueError as error:
            raise ConfigError(
                f"chat=true: {shorten_foreign(error)}; leave chat=true out, or give another model"
            ) from None

    def render_probe(self) -> tuple[list[int], list[int]]:
        """The ids of a user's and an assistant's message as the chat template writes them: up to the end of what the
        assistant says, and what follows. None without a template, or where it fails, which is refused where
        conversations are read."""
        conversation = [{"role": role, "content": PROBE} for role in ("user", "assistant")]
        try:
            text, _ = render_chat(self.chat_template or "", conversation, self.special_tokens)
        except ValueError:
            return [], []
        before, content, behind = text.rpartition(PROBE)
        (first, _), (second, _) = self.encode_special([before + content, behind if content else ""])
        return first, second

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token that ends the assistant's messages: the first added token that the chat template writes behind what
        the assistant says. None without a template, or if it ends them with text alone."""
        added = self.backend.get_added_tokens_decoder()
        return next((token for token in self.render_probe()[1] if token in added), None)

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
            if self.begin != self._own_begin:
                rewrite_begin(Path(folder), self.begin)
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        described = {**self.special_tokens, "clean_up_tokenization_spaces": False} | (
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
    return _build_tokenizer(named, backend, None, notes=drop_lengths(backend))


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


def _build_tokenizer(
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
    return _build_tokenizer(named, backend, original.eos_token_id, original, notes)


def _byte_level(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers (GPT-2's bytes_to_unicode) write for each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
