"""Tokenises the documents of a source in shards, by several processes; what a killed run has finished is kept.

For each shard a folder holds the training tokens, the held-out tokens, and a `.json` that describes them and is written
last. `manifest.json` follows when every shard is there.

Run as a module, this file is one worker process. Workers are new interpreters: forked ones would not be safe beside the
threads of torch and `tokenizers`, and those of multiprocessing need a guard in the script that started them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from trainer.config import ConfigError
from trainer.data.documents import Documents, digest_text
from trainer.data.text import FIRST, LEARNED, RowTally, TextDocument
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokens import (
    TOKEN_DTYPES,
    DataError,
    TokenRun,
    TokenWriter,
    content_digest,
    print_notice,
    start_progress,
)
from trainer.util.reading import (
    Malformed,
    Shape,
    find_mismatch,
    on_one_line,
    path_inside,
    read_json,
    shorten_foreign,
    write_atomic,
)

SPLITS = ("train", "eval")
SHARD_BYTES = 8 << 20
"""Text per shard of all but huge corpora, which have larger shards instead of more of them."""

BATCH = 1 << 20
"""Characters tokenised together."""


@dataclass
class TextCount:
    """What was tokenised: documents, bytes of their text, the tokens of the text without end marks and special tokens,
    and those of them that are the tokenizer's unknown token."""

    documents: int = 0
    text_bytes: int = 0
    text_tokens: int = 0
    unknown: int = 0

    def __add__(self, other: TextCount) -> TextCount:
        return TextCount(*map(sum, zip(astuple(self), astuple(other))))


COUNTS = [one.name for one in fields(TextCount)]

WRITTEN: Shape = {"file": str, "tokens": int, "digest": str, "marks": (str, NoneType), "open": (bool, NoneType)}
WRITTEN |= {name: (int, NoneType) for name in COUNTS}
"""What is noted of each token file. open: see `TokenRun`. Of a stream's, counts are not noted."""

VERIFIED = "verified"
"""An empty file in a folder of token files, as old as the last comparison of their content with its digests."""

CONTENT = (".bin", ".marks", ".json")
"""Files of a folder that such a comparison is of."""

AGAIN = 3600.0
"""Seconds for which a comparison holds: all processes of a start, and the trials of a sweep, wait for one."""

MOST = 64 << 30
"""Bytes that are compared at a start, at some 0.7 GB/s a core on up to eight cores."""

ROW_COUNTS = ("rows", "damaged", "empty", "crlf")
TALLY: Shape = {"first": (str, NoneType), "unread": (dict, NoneType)} | dict.fromkeys(ROW_COUNTS, (int, NoneType))
"""What is noted of the rows that were read, see `RowTally`; of a stream's evaluation set nothing is."""


COUNTED_FROM = 4 << 10
"""Bytes of text from which on it shows what a tokenizer makes of them."""

JUDGED_FROM = 8 * SHARD_BYTES
"""Bytes of text from which on tokenising is broken off for it. A shard may be unlike the rest of a corpus."""

MOST_BYTES_PER_TOKEN = 64
"""Text of which a tokenizer makes fewer tokens is mostly lost. Tokenizers of subwords make a token of 2 to 6 bytes of
any language or code, of whole words 6 to 15, and of text that is mostly runs of blanks up to 30."""

MOST_UNKNOWN = 0.5
"""Share of unknown tokens. Vocabularies of whole words miss 5% to 30% of the words of a text of their language."""


def check_count(count: TextCount, setting: str, tokenizer: str) -> None:
    """Raises `ConfigError` where a tokenizer makes nothing of the text of a source. setting: the source's own;
    tokenizer: the setting that names it."""
    if count.text_bytes < COUNTED_FROM:
        return
    made = ""
    if count.text_bytes > MOST_BYTES_PER_TOKEN * count.text_tokens:
        made = f"makes {count.text_tokens} tokens of {count.text_bytes} bytes of text"
    elif count.unknown > MOST_UNKNOWN * count.text_tokens:
        made = f"knows no token for {100 * count.unknown / count.text_tokens:.0f}% of what it makes of the text"
    if made:
        raise ConfigError(
            f"{tokenizer} {made} in {setting}, so that most of the text is lost; set data.tokenizer to one that is "
            "made for such text, or to bytes"
        )


def count_tokens(tokenizer: Tokenizer, texts: list[str], ids: list[list[int]], special: int = 0) -> TextCount:
    """What a tokenizer made of whole documents. special: how many of the ids are end marks and special tokens."""
    unknown = tokenizer.unknown_id
    return TextCount(
        len(texts),
        sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
        sum(map(len, ids)) - special,
        0 if unknown is None else sum(some.count(unknown) for some in ids),
    )


@dataclass
class TokeniseJob:
    """What a shard's tokens depend on, and where they go. chat: whether the documents are conversations.

    `shards`: first and last document (not included) of each. They follow from the documents alone, so that a resumed
    run with another number of workers finds the same shards.
    """

    documents: Documents
    tokenizer: Tokenizer
    dtype: str
    threshold: int
    folder: Path
    chat: bool = False
    shards: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.shards = shards_of(self.documents)

    def count(self, piece: TextPiece, ids: list[int]) -> TextCount:
        """What was made of a piece, which is a document where an end mark follows it."""
        special = sum(map(self.tokenizer.special_ids.__contains__, ids)) if self.chat else piece.mark
        return replace(count_tokens(self.tokenizer, [piece.text], [ids], special), documents=int(piece.mark))

    def description(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.json"

    def described(self, number: int) -> dict[str, Any] | None:
        """What a finished shard's description says; None where the shard is missing or damaged, or has other
        documents, as an earlier version's may."""
        optional = {split: (dict, NoneType) for split in SPLITS}
        try:
            found = read_json(self.description(number), {"documents": [int], **optional, **TALLY}, "it is made anew")
            for split in set(SPLITS) & set(found):
                check_written(self.folder, found[split], self.dtype)
        except (OSError, Malformed):
            return None
        return found if found["documents"] == list(self.shards[number]) else None


def shards_of(documents: Documents) -> list[tuple[int, int]]:
    """First and last document (not included) of each shard."""
    count, size = len(documents), max(1, documents.bytes)
    step = max(1, count * max(SHARD_BYTES, size // 512) // size)
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def tokenise_shards(job: TokeniseJob, name: str, workers: int, check: Callable[[TextCount], None]) -> None:
    """Writes the shards that are missing and the manifest.

    workers: processes; 0 means one a core. check: called with what has been tokenised so far, once that is much; ends
    the work by a `ConfigError`."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for part in job.folder.glob("*.part"):  # of a killed run
        part.unlink()
    found = [job.described(number) for number in range(len(job.shards))]
    missing = [number for number, shard in enumerate(found) if shard is None]
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    label = f"tokenising {name} ({job.documents.bytes / 1e6:.1f} MB)"
    finished, whole, made = len(found) - len(missing), count_shards(filter(None, found)), TextCount()
    kept = whole
    with start_progress(label, kept.text_bytes) as report:
        for event in _in_processes(job, missing, workers) if workers > 1 else _in_turn(job, missing):
            if isinstance(event, TextCount):
                made += event
            else:
                finished, whole = finished + 1, whole + count_shards([job.described(event) or {}])
            if (kept + made).text_bytes > JUDGED_FROM:
                check(kept + made)
            # Rows have more bytes than their text: what is done tells how many bytes of text there are.
            expected = whole.text_bytes / finished * len(found) if finished else job.documents.bytes
            report(made.text_bytes, made.text_tokens, max(expected, (kept + made).text_bytes))
    described = [job.described(number) or {} for number in range(len(job.shards))]
    files = {split: [shard[split] for shard in described if split in shard] for split in SPLITS}
    write_manifest(job.folder, job.dtype, files, sum(map(tally_of, described), RowTally()))


def count_shards(described: Iterable[dict[str, Any]]) -> TextCount:
    """What the descriptions of shards say that was tokenised."""
    return add_counts([shard[split] for shard in described for split in SPLITS if split in shard])


def add_counts(files: list[dict[str, Any]]) -> TextCount:
    """What the descriptions of token files say that was tokenised; those of a stream say nothing."""
    return TextCount(*(sum(written.get(name) or 0 for written in files) for name in COUNTS))


def tally_of(noted: dict[str, Any]) -> RowTally:
    """What a manifest or the description of a shard says of rows."""
    tally = RowTally(first=noted.get("first") or "", **{name: noted.get(name) or 0 for name in ROW_COUNTS})
    for name, rows in (noted.get("unread") or {}).items():
        if isinstance(rows, int):
            tally.count_unread([name], rows)
    return tally


def write_manifest(folder: Path, dtype: str, files: dict[str, list[dict]], tally: RowTally | None = None) -> None:
    """Marks the folder as complete."""
    write_atomic(folder / "manifest.json", json.dumps({"dtype": dtype, "files": files, **asdict(tally or RowTally())}))


class Manifest(NamedTuple):
    """A folder of tokens: the token files of each split, digests of their content, the rows that they were made of,
    and what was tokenised of each split."""

    runs: dict[str, list[TokenRun]]
    digests: list[str]
    tally: RowTally
    counts: dict[str, TextCount]


def read_manifest(folder: Path) -> Manifest:
    """What is in a folder of tokens. Raises `ConfigError` for missing or cut files, and for a manifest that is damaged
    or names files elsewhere."""
    way_out = f"delete the folder {folder} and it is made anew"
    try:
        manifest = read_json(
            folder / "manifest.json", {"dtype": str, "files": {split: [WRITTEN] for split in SPLITS}, **TALLY}, way_out
        )
        dtype, files = manifest["dtype"], manifest["files"]
        runs = {split: [check_written(folder, file, dtype) for file in files[split]] for split in SPLITS}
    except OSError as error:
        raise ConfigError(
            f"data.cache: {folder / 'manifest.json'} cannot be read: {error.strerror}; {way_out}"
        ) from None
    except Malformed as error:
        raise ConfigError(f"data.cache: {error}" + ("" if way_out in str(error) else f"; {way_out}")) from None
    return Manifest(
        runs,
        [file["digest"] for split in SPLITS for file in files[split]],
        tally_of(manifest),
        {split: add_counts(files[split]) for split in SPLITS},
    )


def is_due(folder: Path) -> bool:
    """Whether the content of a folder of token files is to be compared with its digests: within `AGAIN` nobody has, or
    a file has changed since."""
    try:
        done = (folder / VERIFIED).stat()
        times = [entry.stat().st_ctime_ns for entry in os.scandir(folder) if entry.name.endswith(CONTENT)]
        newest = max(folder.stat().st_mtime_ns, *times)  # the folder's, because a file may be gone
    except OSError:
        return True
    return newest > done.st_mtime_ns or not 0 <= time.time() - done.st_mtime <= AGAIN


def mark_verified(folder: Path) -> None:
    """Notes that the content of a folder is what its digests say. A folder of somebody else's is left as it is."""
    with contextlib.suppress(OSError):
        (folder / VERIFIED).touch()


def remove_damaged(folder: Path) -> None:
    """Compares token files with their digests, up to about `MOST` bytes of them, and of more some by chance. Removes
    those that differ and the manifest, so that they are made anew, and says so. Raises `OSError`."""
    try:
        runs, digests, *_ = read_manifest(folder)
    except ConfigError as error:
        print_notice(f"{str(error).partition('; delete')[0]}; it is made anew")
        return (folder / "manifest.json").unlink()
    contents = {}
    for run, noted in zip(itertools.chain(*runs.values()), digests):
        contents |= dict(zip(filter(None, (run.path, run.marks)), noted.split()))
    left, chosen = MOST, []
    for path in random.SystemRandom().sample([*contents], len(contents)):
        if left > 0:
            chosen.append(path)
            left -= os.path.getsize(path)
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:  # hashing releases the interpreter's lock
        damaged = [path for path, found in zip(chosen, pool.map(content_digest, chosen)) if found != contents[path]]
    for path in damaged:
        os.unlink(path)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        print_notice(f"data.cache: {damaged[0]}{more}: not the tokens that were written there; made anew")
        (folder / "manifest.json").unlink()


def check_written(folder: Path, written: Any, dtype: str) -> TokenRun:
    """The token file in `folder` that is described as `WRITTEN`. Raises `Malformed` unless it is there, whole."""
    if wrong := find_mismatch(written, WRITTEN):
        raise Malformed(f"a token file of {folder} is not described: {wrong}")
    if dtype not in TOKEN_DTYPES:
        raise Malformed(
            f"the tokens in {folder} are of type {shorten_foreign(dtype)}; legal: {', '.join(TOKEN_DTYPES)}"
        )
    count, marks = written["tokens"], written.get("marks")
    path = _whole(folder, written["file"], count * np.dtype(dtype).itemsize)
    return TokenRun(path, dtype, 0, count, marks and _whole(folder, marks, count), bool(written.get("open")))


def _whole(folder: Path, name: str, size: int) -> str:
    """The path of a file in `folder` that has `size` bytes."""
    try:
        path = path_inside(folder, name)
        whole = path.stat().st_size == size
    except (OSError, ValueError):
        path, whole = folder / on_one_line(name), False
    if not whole:
        raise Malformed(f"{path} is missing or damaged")
    return str(path)


def write_shard(job: TokeniseJob, number: int) -> Iterator[TextCount]:
    """Tokenises one shard, and yields what each batch of texts came to; its description appears when its files are
    complete."""
    stem = str(job.description(number).with_suffix(""))
    writers = {held: TokenWriter(f"{stem}.{split}.bin", job.dtype, job.chat) for held, split in enumerate(SPLITS)}
    begun = _find_begun(job, number)
    job.documents.take_tally()  # of what was read before
    counts, piece = [TextCount() for _ in SPLITS], None
    try:
        documents = job.documents.read(*job.shards[number])
        for pieces in _batches(mark_pieces(documents, job.threshold, begun)):
            batch = [TextCount() for _ in SPLITS]
            for piece, (ids, marks) in zip(pieces, encode_pieces(job.tokenizer, pieces, job.chat)):
                writers[piece.held].append(ids, marks)
                batch[piece.held] += job.count(piece, ids)
            counts = [before + new for before, new in zip(counts, batch)]
            yield sum(batch, TextCount())
        tally = job.documents.take_tally()
        goes_on = piece is not None and not piece.mark and _goes_on(job, number, piece.held)
        if piece is not None and not piece.mark and not goes_on:
            writers[piece.held].append([job.tokenizer.end_id])
            counts[piece.held] += TextCount(documents=1)
        written = {
            split: writers[held].finish() | asdict(counts[held])
            for held, split in enumerate(SPLITS)
            if writers[held].count
        }
        if piece is not None and goes_on:
            written[SPLITS[piece.held]]["open"] = True
        described = {"documents": job.shards[number], **written, **asdict(tally)}
        write_atomic(job.description(number), json.dumps(described))
    finally:
        for writer in writers.values():
            writer.discard()


def _goes_on(job: TokeniseJob, number: int, held: bool) -> bool:
    """Whether the document with which a shard ends goes on in a later shard, on the same side of the split. What is
    read for this is counted where it is tokenised."""
    for text, *_ in job.documents.read(job.shards[number][1], len(job.documents)):
        job.documents.take_tally()
        return bool(text) and (digest_text(text) < job.threshold) == held
    return False


def _find_begun(job: TokeniseJob, number: int) -> bool | None:
    """Whether the document inside of which a shard begins is held out; None if a document begins there. The last text
    before the shard tells, as the first one behind it does in `_goes_on`."""
    first = job.shards[number][0]
    while job.documents.begins_inside(first):
        first -= 1
        for text, final, *_ in job.documents.read(first, first + 1):
            return None if final else digest_text(text) < job.threshold
    return None


@dataclass(frozen=True)
class TextPiece:
    """A text, whether it is held out, whether an end mark follows it, the spans of a conversation that are learned, and
    whether a document begins with it."""

    text: str
    held: bool
    mark: bool
    spans: tuple[tuple[int, int], ...] | None
    first: bool = True


def encode_pieces(
    tokenizer: Tokenizer, pieces: list[TextPiece], chat: bool = False
) -> Iterator[tuple[list[int], np.ndarray | None]]:
    """The ids of each piece, and the marks of a conversation's, which its template ends."""
    texts, begin, end = [piece.text for piece in pieces], tokenizer.document_begin, [tokenizer.end_id]
    if not chat:
        for piece, ids in zip(pieces, tokenizer.encode_batch(texts)):
            yield [*begin * piece.first, *ids, *end * piece.mark], None
        return
    for piece, (ids, offsets) in zip(pieces, tokenizer.encode_special(texts)):
        starts, ends = offsets.T
        marks = np.zeros(len(ids), np.uint8)
        for first, last in piece.spans or ():
            marks[(starts < last) & (ends > first)] = LEARNED
        marks[:1] |= FIRST
        yield ids, marks


def mark_pieces(documents: Iterable[TextDocument], threshold: int, begun: bool | None = None) -> Iterator[TextPiece]:
    """The documents as pieces. Between two chunks of one document there is no end mark, unless the split puts them on
    different sides, and the next chunk then begins a document; nor is there an end mark behind the last chunk, if the
    document goes on behind it. begun: see `_find_begun`."""
    waiting: TextPiece | None = None
    for text, final, spans, _ in documents:
        if not text:  # the end of a file, whose lines were left out
            waiting, begun = waiting and replace(waiting, mark=True), None
            continue
        held = digest_text(text) < threshold
        if waiting:
            yield replace(waiting, mark=waiting.mark or held != waiting.held)
        waiting, begun = TextPiece(text, held, final, spans, held != begun), None if final else held
    if waiting:
        yield waiting


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_turn(job: TokeniseJob, numbers: list[int]) -> Iterator[TextCount | int]:
    """Yields what each batch of texts came to, and each number when its shard is done."""
    for number in numbers:
        yield from write_shard(job, number)
        yield number


def _in_processes(job: TokeniseJob, numbers: list[int], workers: int) -> Iterator[TextCount | int]:
    """Yields the same from several processes. They get the job through their standard input, which nobody else can
    write, and report to one pipe, a line of JSON at a time."""
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
                yield report["shard"] if "shard" in report else TextCount(*report["count"])
        codes = [process.wait() for process in processes]
        if any(codes):
            raise DataError(
                f"processes that tokenise ended with {codes}; finished shards are kept, run it again (with fewer "
                "data.workers if memory ran out)"
            )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_worker(pipe: int, numbers: list[int]) -> None:
    """One worker process. It ends without a word when the process that started it is gone, and at Ctrl-C."""
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    with open(pipe, "w", buffering=1) as reports:
        try:
            for event in _in_turn(pickle.load(sys.stdin.buffer), numbers):
                report = {"count": astuple(event)} if isinstance(event, TextCount) else {"shard": event}
                print(json.dumps(report), file=reports)
        except ConfigError as error:
            print(json.dumps({"problems": error.problems}), file=reports)


if __name__ == "__main__":
    run_worker(int(sys.argv[1]), [int(number) for number in sys.argv[2:]])
