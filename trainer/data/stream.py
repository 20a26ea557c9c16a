"""A data set of the Hugging Face hub, streamed while training and packed in the order in which its documents arrive.

Sequence i of a stream depends on the stream, the tokenizer and the sequence length, not on ranks. The position in
samples is therefore enough to resume under any plan. Unlike other sources, a stream is not shuffled beyond the hub's
own order, every rank reads and tokenises all of it, and an epoch has no known length. When the stream ends, it starts
again.

To reach a position, a reader has to read all that comes before. It therefore saves its state to the cache every
`NOTE_EVERY` sequences, and starts from the last saved state before its position. Without saved states (on another
machine) it reads from the start."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from trainer.data.documents import HubStream, digest_text
from trainer.data.progress import print_notice
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokens import DataError, TokenSample, TokenWriter, number_documents
from trainer.util.files import write_atomic
from trainer.util.reading import Malformed, read_json, shorten_foreign

GROUP = 64
"""Documents tokenised together."""

NOTE_EVERY = 1024
"""Sequences between two saved states of the reader."""


class StreamedSequences:
    """Sequences of a stream, see `tokens.TokenSequences`. Rising order is fast; going back starts the stream again."""

    length = None

    def __init__(self, documents: HubStream, tokenizer: Tokenizer, threshold: int, sequence_length: int, notes: Path):
        self.name, self.documents, self.tokenizer = documents.name, documents, tokenizer
        self.threshold, self.size, self.notes = threshold, sequence_length, notes
        self._rows: Iterator[dict] | None = None

    def get(self, index: int) -> TokenSample:
        """See `Sequences`. Raises `DataError` when the stream breaks off or holds no text."""
        if self._rows is None or index < self._next:
            self._start(index)
        while True:
            while len(self._buffer) <= self.size:
                self._pull()
            tokens = self._buffer[: self.size + 1]
            self._buffer, self._next = self._buffer[self.size :], self._next + 1
            if self._next > index:
                return TokenSample(tokens, number_documents(tokens, self.tokenizer.end_id))

    def _start(self, index: int) -> None:
        """Goes to the last saved state at or before sequence `index`, else to the start."""
        self._next, self._buffer, self._kept, self._note_read = 0, np.empty(0, np.int64), False, None
        self._dataset = self.documents.open()
        found = {int(path.stem): path for path in self.notes.glob("*.json") if re.fullmatch("[0-9]{12,18}", path.stem)}
        for number in sorted((number for number in found if number <= index), reverse=True):
            try:
                self._go_to(number, found[number])
                break
            except (OSError, Malformed) as error:
                print_notice(f"{error}; it is left out")
                self._dataset = self.documents.open()
        self._noted, self._rows = self._next, self.documents.rows(self._dataset)

    def _go_to(self, number: int, path: Path) -> None:
        """Continues as the note at `path` says. Raises `Malformed` where it says nothing that could be true."""
        note = read_json(path, {"state": dict, "tokens": [int]}, "delete it")
        if not all(0 <= token < self.tokenizer.vocab_size for token in note["tokens"]):
            raise Malformed(f"{path} holds tokens beyond the tokenizer's {self.tokenizer.vocab_size}; delete it")
        try:
            self._dataset.load_state_dict(note["state"])
        except Exception as error:  # whatever datasets meets in a state that it has not written
            raise Malformed(f"{path} is no state of the stream: {shorten_foreign(error)}; delete it") from error
        self._next, self._buffer, self._kept = number, np.asarray(note["tokens"], np.int64), True
        self._note_read = path

    def _pull(self) -> None:
        """Tokenises the next group of documents; at the end of the stream, opens it again."""
        if self._next - self._noted >= NOTE_EVERY and os.environ.get("LOCAL_RANK", "0") == "0":
            self._note()
        try:
            rows = list(islice(self._rows, GROUP))
        except DataError as error:
            self._rows = None  # otherwise the failed reader would look as if it were at its end
            if self._note_read is None:
                raise
            raise DataError(
                f"{error} (it was read on as {self._note_read} says; delete that if it is damaged)"
            ) from error
        self._note_read = None
        texts = [text for text in self.documents.texts(rows) if digest_text(text) >= self.threshold]
        if texts:
            self._kept = True
            encoded = self.tokenizer.encode_batch(texts)
            self._buffer = np.concatenate([self._buffer, *([*ids, self.tokenizer.end_id] for ids in encoded)])
        if len(rows) < GROUP:
            if not self._kept:
                raise DataError(
                    f"{self.documents.setting}: the stream {self.documents.source.path} holds no text to train on"
                )
            self._dataset = self.documents.open()
            self._rows = self.documents.rows(self._dataset)

    def _note(self) -> None:
        self._noted = self._next
        self.notes.mkdir(parents=True, exist_ok=True)
        note = {"state": self._dataset.state_dict(), "tokens": self._buffer.tolist()}
        write_atomic(self.notes / f"{self._next:012d}.json", json.dumps(note))


def hold_out(documents: HubStream, tokenizer: Tokenizer, threshold: int, tokens: int, writer: TokenWriter) -> None:
    """Writes the stream's first held-out documents: at least `tokens` tokens, or all there are."""
    for text in documents.texts(documents.rows(documents.open())):
        if writer.count >= tokens:
            return
        if digest_text(text) < threshold:
            writer.append([*tokenizer.encode(text), tokenizer.end_id])
