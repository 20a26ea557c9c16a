"""Small corpora for the tests of the data layer."""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import json.decoder
import os
import pprint
import shutil
import signal
import textwrap
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer.config import Config, SourceConfig
from trainer.data.text import TextFiles
from trainer.data.tokenizer import byte_tokenizer


def config(folder: Path, length: int = 16, tokenizer: str = "bytes", **sources: SourceConfig) -> Config:
    """A configuration on `sources`, with its cache in `folder`."""
    made = Config()
    made.model.vocab_size = 512
    made.batch.sequence_length = length
    made.data.sources, made.data.tokenizer, made.data.cache = sources, tokenizer, str(folder / "cache")
    made.data.eval_fraction, made.data.workers = 0.2, 1
    return made


def sources_of_runs(folder: Path) -> None:
    """The texts that tests/workers/parallel_runs.py trains on and evaluates, as folders of `folder`. `more` has many
    files, so that a stream of them has several lanes."""
    modules = {"corpus": (argparse, json.decoder, shutil, textwrap), "more": (pprint, heapq), "apart": (bisect,)}
    for name, some in modules.items():
        (folder / name).mkdir()
        for module in some:
            if name == "more":
                paragraphs = Path(module.__file__).read_text().split("\n\n")
                write_texts(folder / name / module.__name__, [text for text in paragraphs if len(text) > 100])
            else:
                shutil.copy(module.__file__, folder / name / f"{module.__name__}.txt")


def texts(count: int, kind: str = "document") -> list[str]:
    return [f"{kind} {number}: " + f"{number * 7919 % 1000} " * (3 + number % 5) for number in range(count)]


def write_jsonl(path: Path, rows: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: row, "id": number}) + "\n" for number, row in enumerate(rows)))
    return path


def write_texts(folder: Path, rows: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        (folder / f"{number:04d}.txt").write_text(row)
    return folder


MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template that says what the assistant's part is."""

PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same, and it does not."""


def chat_tokenizer(folder: Path, template: str | None) -> Any:
    """A transformers tokenizer of bytes, saved to `folder`, with special tokens around messages."""
    backend = byte_tokenizer().backend
    backend.encode_special_tokens = False
    special = ["<|im_start|>", "<|im_end|>"]
    original = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[1], extra_special_tokens=special[:1])
    original.chat_template = template
    original.save_pretrained(folder)
    return original


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Of one to three questions each, some after a system message."""
    made = []
    for number in range(count):
        messages = [{"role": "system", "content": "Answer."}] * (number % 4 == 0)
        for turn in range(1 + number % 3):
            asked = {"role": "user", "content": f"What is {number} + {turn}?"}
            messages += [asked, {"role": "assistant", "content": f"It is {number + turn}, " + "yes " * (number % 5)}]
        made.append(messages)
    return made


def write_conversations(path: Path, rows: list[list[dict[str, str]]], column: str = "messages") -> Path:
    path.write_text("".join(json.dumps({"id": number, column: row}) + "\n" for number, row in enumerate(rows)))
    return path


def stream(samples, tokenizer) -> list[str]:
    """The documents of all sequences of map-style samples, joined again (the last one may be cut)."""
    ids = [token for index in range(len(samples)) for token in samples.get(index)[0][:-1].tolist()]
    pieces, current = [], []
    for token in ids:
        if token == tokenizer.end_id:
            pieces.append(tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    return pieces


class DyingFiles(TextFiles):
    """Kills the process that reads its second shard, and only a worker has such a process."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.maker = os.getpid()

    def read(self, first: int, last: int):
        if first and os.getpid() != self.maker:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(first, last)
