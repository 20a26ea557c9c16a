"""Tokenises the documents of a source in shards, by several processes; what a killed run has finished is kept.

For each shard a folder holds the training tokens, the held-out tokens, and a `.json` that describes them and is written
last. `manifest.json` follows when every shard is there.

Run as a module, this file is one worker process. Workers are new interpreters: forked ones would not be safe beside the
threads of torch and `tokenizers`, and those of multiprocessing need a guard in the script that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from trainer.config import ConfigError
from trainer.data.documents import Documents, digest
from trainer.data.progress import progress
from trainer.data.text import Document
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokens import TOKEN_DTYPES, TokenRun, TokenWriter
from trainer.util.files import write_atomic
from trainer.util.reading import Malformed, Shape, brief, inside, mismatch, read_json

SPLITS = ("train", "eval")
SHARD_BYTES = 8 << 20
"""Text per shard of all but huge corpora, which have larger shards instead of more of them."""

BATCH = 1 << 20
"""Characters tokenised together."""

WRITTEN: Shape = {"file": str, "tokens": int, "digest": str}
"""What is noted of each token file."""


@dataclass
class TokeniseJob:
    """What a shard's tokens depend on, and where they go.

    `shards`: first and last document (not included) of each. They follow from the documents alone, so that a resumed
    run with another number of workers finds the same shards.
    """

    documents: Documents
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

    def described(self, number: int) -> dict[str, Any] | None:
        """What a finished shard's description says; None where the shard is missing or damaged, or has other
        documents, as an earlier version's may."""
        optional = {split: (dict, NoneType) for split in SPLITS}
        try:
            found = read_json(self.description(number), {"documents": [int], **optional}, "it is made anew")
            for split in set(SPLITS) & set(found):
                check_written(self.folder, found[split], self.dtype)
        except (OSError, Malformed):
            return None
        return found if found["documents"] == list(self.shards[number]) else None


def tokenise(job: TokeniseJob, name: str, workers: int) -> None:
    """Writes the shards that are missing and the manifest. `workers`: processes; 0 means one a core."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for part in job.folder.glob("*.part"):  # of a killed run
        part.unlink()
    missing = [number for number in range(len(job.shards)) if job.described(number) is None]
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    label = f"tokenising {name} ({job.documents.bytes / 1e6:.1f} MB)"
    with progress(label, len(job.shards)) as advance:
        advance(len(job.shards) - len(missing))
        for _ in _in_processes(job, missing, workers) if workers > 1 else _in_turn(job, missing):
            advance(1)
    described = [job.described(number) or {} for number in range(len(job.shards))]
    files = {split: [shard[split] for shard in described if split in shard] for split in SPLITS}
    write_manifest(job.folder, job.dtype, files)


def write_manifest(folder: Path, dtype: str, files: dict[str, list[dict]]) -> None:
    """Marks the folder as complete."""
    write_atomic(folder / "manifest.json", json.dumps({"dtype": dtype, "files": files}))


def read_manifest(folder: Path) -> tuple[dict[str, list[TokenRun]], list[str]]:
    """The token files of each split, and digests of their content. Raises `ConfigError` for missing or cut files, and
    for a manifest that is damaged or names files elsewhere."""
    way_out = f"delete the folder {folder} and it is made anew"
    try:
        manifest = read_json(
            folder / "manifest.json", {"dtype": str, "files": {split: [WRITTEN] for split in SPLITS}}, way_out
        )
        dtype, files = manifest["dtype"], manifest["files"]
        runs = {split: [check_written(folder, file, dtype) for file in files[split]] for split in SPLITS}
    except OSError as error:
        raise ConfigError(
            f"data.cache: {folder / 'manifest.json'} cannot be read: {error.strerror}; {way_out}"
        ) from None
    except Malformed as error:
        raise ConfigError(f"data.cache: {error}" + ("" if way_out in str(error) else f"; {way_out}")) from None
    return runs, [file["digest"] for split in SPLITS for file in files[split]]


def check_written(folder: Path, written: Any, dtype: str) -> TokenRun:
    """The token file in `folder` that is described as `WRITTEN`. Raises `Malformed` unless it is there, whole."""
    if wrong := mismatch(written, WRITTEN):
        raise Malformed(f"a token file of {folder} is not described: {wrong}")
    if dtype not in TOKEN_DTYPES:
        raise Malformed(f"the tokens in {folder} are of type {brief(dtype)}; legal: {', '.join(TOKEN_DTYPES)}")
    try:
        path = inside(folder, written["file"])
        whole = path.stat().st_size == written["tokens"] * np.dtype(dtype).itemsize
    except (OSError, ValueError):
        path, whole = folder / brief(written["file"]), False
    if not whole:
        raise Malformed(f"{path} is missing or damaged")
    return TokenRun(str(path), dtype, 0, written["tokens"])


def write_shard(job: TokeniseJob, number: int) -> None:
    """Tokenises one shard; its description appears when its files are complete."""
    stem = str(job.description(number).with_suffix(""))
    writers = {held: TokenWriter(f"{stem}.{split}.bin", job.dtype) for held, split in enumerate(SPLITS)}
    try:
        for texts in _batches(_marked(job.documents.read(*job.shards[number]), job.threshold)):
            for (_, held, mark), ids in zip(texts, job.tokenizer.encode_batch([text for text, _, _ in texts])):
                writers[held].append([*ids, job.tokenizer.end_id] if mark else ids)
        written = {split: writers[held].finish() for held, split in enumerate(SPLITS) if writers[held].count}
        write_atomic(job.description(number), json.dumps({"documents": job.shards[number], **written}))
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
    """Yields each number when its shard is done. Workers get the job through their standard input, which nobody else
    can write, and report to one pipe, a line of JSON at a time."""
    package = str(Path(__file__).parents[2])
    environment = {  # what this process can import, a registered source's module among it
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, *sys.path])),
    }
    read, write = os.pipe()
    command = [sys.executable, "-m", __name__, str(write)]
    processes = [
        subprocess.Popen(
            [*command, *map(str, numbers[rank::workers])],
            env=environment,
            pass_fds=[write],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(workers)
    ]
    os.close(write)
    try:
        plan = pickle.dumps(job)
        for process in processes:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(plan)
        with open(read) as reports:
            for line in reports:
                report = json.loads(line)
                if "problems" in report:
                    raise ConfigError(report["problems"])
                yield report["shard"]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(
                f"processes that tokenise ended with {codes}; finished shards are kept, run it again (with fewer "
                "data.workers if memory ran out)"
            )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def work(pipe: int, numbers: list[int]) -> None:
    """One worker process. Writing to the pipe fails, and ends it, when the process that started it is gone."""
    with open(pipe, "w", buffering=1) as reports:
        try:
            for number in _in_turn(pickle.load(sys.stdin.buffer), numbers):
                print(json.dumps({"shard": number}), file=reports)
        except ConfigError as error:
            print(json.dumps({"problems": error.problems}), file=reports)


if __name__ == "__main__":
    work(int(sys.argv[1]), [int(number) for number in sys.argv[2:]])
