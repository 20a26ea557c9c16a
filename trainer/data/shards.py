"""Tokenises the documents of a source in shards, by several processes; what a killed run has finished is kept.

For each shard a folder holds the training tokens, the held-out tokens, and a `.json` that describes them and is written
last. `manifest.json` follows when every shard is there.

Run as a module, this file is one worker process. Workers are new interpreters: forked ones would not be safe beside the
threads of torch and `tokenizers`, and those of multiprocessing need a guard in the script that started them.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.config import ConfigError
from trainer.data.documents import Document, Table, TextFiles, digest
from trainer.data.progress import progress
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokens import TokenRun, TokenWriter
from trainer.util.files import write_atomic

SPLITS = ("train", "eval")
SHARD_BYTES = 8 << 20
"""Text per shard of all but huge corpora, which have larger shards instead of more of them."""

BATCH = 1 << 20
"""Characters tokenised together."""


@dataclass
class TokeniseJob:
    """What a shard's tokens depend on, and where they go.

    `shards`: first and last document (not included) of each. They follow from the documents alone, so that a resumed
    run with another number of workers finds the same shards.
    """

    documents: TextFiles | Table
    tokenizer: Tokenizer
    dtype: str
    threshold: int
    folder: Path
    shards: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        count, size = len(self.documents), max(1, self.documents.bytes)
        step = max(1, count * max(SHARD_BYTES, size // 512) // size)
        self.shards = [(first, min(first + step, count)) for first in range(0, count, step)]

    def description(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.json"


def tokenise(job: TokeniseJob, name: str, workers: int) -> None:
    """Writes the shards that are missing and the manifest. `workers`: processes; 0 means one a core."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for part in job.folder.glob("*.part"):  # of a killed run
        part.unlink()
    missing = [number for number in range(len(job.shards)) if not job.description(number).exists()]
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    label = f"tokenising {name} ({job.documents.bytes / 1e6:.1f} MB)"
    with progress(label, len(job.shards)) as advance:
        advance(len(job.shards) - len(missing))
        for _ in _in_processes(job, missing, workers) if workers > 1 else _in_turn(job, missing):
            advance(1)
    described = [json.loads(job.description(number).read_text()) for number in range(len(job.shards))]
    files = {split: [shard[split] for shard in described if split in shard] for split in SPLITS}
    write_manifest(job.folder, job.dtype, files)


def write_manifest(folder: Path, dtype: str, files: dict[str, list[dict]]) -> None:
    """Marks the folder as complete."""
    write_atomic(folder / "manifest.json", json.dumps({"dtype": dtype, "files": files}))


def read_manifest(folder: Path) -> tuple[dict[str, list[TokenRun]], list[str]]:
    """The token files of each split, and digests of their content. Raises `ConfigError` for missing or cut files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    dtype, files = manifest["dtype"], manifest["files"]
    runs = {
        split: [TokenRun(str(folder / file["file"]), dtype, 0, file["tokens"]) for file in files[split]]
        for split in SPLITS
    }
    for run in itertools.chain(*runs.values()):
        size = run.length * np.dtype(dtype).itemsize
        if not os.path.exists(run.path) or os.path.getsize(run.path) != size:
            raise ConfigError(
                f"data.cache: {run.path} is missing or damaged; delete the folder {folder} and it is made anew"
            )
    return runs, [file["digest"] for split in SPLITS for file in files[split]]


def write_shard(job: TokeniseJob, number: int) -> None:
    """Tokenises one shard; its description appears when its files are complete."""
    stem = str(job.description(number).with_suffix(""))
    writers = {held: TokenWriter(f"{stem}.{split}.bin", job.dtype) for held, split in enumerate(SPLITS)}
    try:
        for texts in _batches(_marked(job.documents.read(*job.shards[number]), job.threshold)):
            for (_, held, mark), ids in zip(texts, job.tokenizer.encode_batch([text for text, _, _ in texts])):
                writers[held].append([*ids, job.tokenizer.end_id] if mark else ids)
        written = {split: writers[held].finish() for held, split in enumerate(SPLITS) if writers[held].count}
        write_atomic(job.description(number), json.dumps(written))
    finally:
        for writer in writers.values():
            writer.discard()


def _marked(documents: Iterable[Document], threshold: int) -> Iterator[tuple[str, bool, bool]]:
    """Yields each text, whether it is held out, and whether an end mark follows it.

    Between two chunks of one document there is no end mark, unless the split puts them on different sides.
    """
    waiting: tuple[str, bool, bool] | None = None
    for text, final in documents:
        held = digest(text) < threshold
        if waiting:
            yield waiting[0], waiting[1], waiting[2] or held != waiting[1]
        waiting = text, held, final
    if waiting:
        yield waiting[0], waiting[1], True


def _batches(texts: Iterable[tuple[str, bool, bool]]) -> Iterator[list[tuple[str, bool, bool]]]:
    batch, size = [], 0
    for entry in texts:
        batch.append(entry)
        size += len(entry[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_turn(job: TokeniseJob, numbers: list[int]) -> Iterator[int]:
    for number in numbers:
        write_shard(job, number)
        yield number


def _in_processes(job: TokeniseJob, numbers: list[int], workers: int) -> Iterator[int]:
    """Yields each number when its shard is done. Workers report to one pipe, a line of JSON at a time."""
    package = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
    }
    with tempfile.NamedTemporaryFile() as plan:
        pickle.dump(job, plan)
        plan.flush()
        read, write = os.pipe()
        command = [sys.executable, "-m", __name__, plan.name, str(write)]
        processes = [
            subprocess.Popen(
                [*command, *map(str, numbers[rank::workers])],
                env=environment,
                pass_fds=[write],
                stdout=subprocess.DEVNULL,
            )
            for rank in range(workers)
        ]
        os.close(write)
        try:
            with open(read) as reports:
                for line in reports:
                    report = json.loads(line)
                    if "problems" in report:
                        raise ConfigError(report["problems"])
                    yield report["shard"]
            codes = [process.wait() for process in processes]
            if any(codes):
                raise RuntimeError(
                    f"processes that tokenise ended with {codes}; finished shards are kept, run it again "
                    "(with fewer data.workers if memory ran out)"
                )
        finally:
            for process in processes:
                process.kill()
                process.wait()


def work(plan: str, pipe: int, numbers: list[int]) -> None:
    """One worker process. Writing to the pipe fails, and ends it, when the process that started it is gone."""
    with open(plan, "rb") as handle, open(pipe, "w", buffering=1) as reports:
        try:
            for number in _in_turn(pickle.load(handle), numbers):
                print(json.dumps({"shard": number}), file=reports)
        except ConfigError as error:
            print(json.dumps({"problems": error.problems}), file=reports)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), [int(number) for number in sys.argv[3:]])
