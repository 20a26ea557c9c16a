"""The documents of one source: files, or data sets of the hub through `datasets`; and which are held out."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import ConfigError, CorpusConfig
from trainer.config.fields import suggest_nearest
from trainer.config.registry import SOURCES
from trainer.data.tables import JsonLines, ParquetRows
from trainer.data.text import Absent, ChatTemplate, DamagedRows, RowTally, TextDocument, TextFiles, plain_text
from trainer.data.tokens import DataError, on_terminal, print_notice
from trainer.util.objects import ObjectStore, StoredObject, StoreError, is_url, transfer_all
from trainer.util.reading import leads_out, on_one_line, shorten_foreign, write_atomic

T = TypeVar("T")

COUNTED = 10_000
"""Up to this many documents exactly the held-out share is held out; above, a threshold on hashes is close enough."""

PACKED = (".gz", ".zst", ".xz", ".bz2")
JSON = tuple(f".{lines}{packed}" for packed in ("", *PACKED) for lines in ("jsonl", "json", "ndjson"))
PARQUET = (".parquet", ".pq")
SUFFIXES = {
    "text": ("",),
    "jsonl": JSON,
    "parquet": PARQUET,
    "chat": (*JSON, *PARQUET),
    "tokens": (".bin", ".npy", ".ds"),
}
"""What a folder of each kind is searched for, in lower or upper case; all names end in an empty text."""

BESIDE = {".idx": ".bin", ".ds.index": ".ds", ".ds.metadata": ".ds", ".ds.loss": ".ds"}
"""Files that describe a token file, and what the name of that one ends in instead."""

SILENT = re.compile(r"\..*|_SUCCESS|_metadata|_common_metadata|_(started|committed)_\d+|.*\.crc", re.DOTALL)
"""Names of files that hold no documents, which nobody misses: hidden ones, and the marks and checksums of Spark."""

TABLES = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}
"""Folders that make the folder around them a table, of which some files are no longer part."""

NAMED_KINDS = 5
"""Kinds of unread files that a note names."""

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders in the standard library's folder that are left out: other packages, and tests, which some systems lack."""


class DatasetRows(DamagedRows):
    """Rows of a `datasets.Dataset`, one document each."""

    def __init__(self, setting: str, dataset: Any, source: CorpusConfig, skip: bool = False):
        super().__init__(skip)
        check_column(setting, source, dataset.column_names, dataset.features)
        self.rows, self.setting, self.path = dataset.select_columns([source.field]), setting, source.path
        self.field, self.length = source.field, min(len(dataset), source.limit or len(dataset))
        self.bytes = dataset.data.nbytes * self.length // max(1, len(dataset))
        self.unread = [name for name in dataset.column_names if name != source.field]

    def __len__(self) -> int:
        return self.length

    def read(self, first: int, last: int) -> Iterator[TextDocument]:
        self.tally.count_unread(self.unread, last - first)
        for start in range(first, last, 256):
            for number, text in enumerate(self.rows[start : min(start + 256, last)][self.field], start):
                self.tally.rows += 1
                try:
                    yield from self.keep(TextDocument(plain_text(text)))
                except ValueError as error:
                    problem = f"{self.setting}.field={self.field}: row {number} of {self.path} {error}"
                    self.leave_out(ConfigError(problem), absent=isinstance(error, Absent))


class OwnDocuments(DamagedRows):
    """Documents of a registered source. Errors of its code become `ConfigError`."""

    SAMPLED = 64
    """Documents by whose length the bytes of all are estimated."""

    def __init__(self, setting: str, config: CorpusConfig):
        super().__init__(skip=False)
        entry = SOURCES[config.kind]
        self.named = f"{setting}: {entry.home}"
        self.made, self.settings = entry.made, entry.chosen(config.settings)
        with self.blaming():
            self.length = min(len(self.source), config.limit or len(self.source))
            self.identity = json.loads(json.dumps(self.source.identity()))
        stride = max(1, self.length // self.SAMPLED)
        sizes = [len(one.text.encode()) for n in range(0, self.length, stride) for one in self.read(n, n + 1)]
        self.bytes = sum(sizes) * self.length // max(1, len(sizes))

    @cached_property
    def source(self) -> Any:
        return self.made(self.settings)

    def __getstate__(self) -> dict[str, Any]:
        """For the processes that tokenise, which open the source anew."""
        return {name: value for name, value in vars(self).items() if name != "source"}

    def __len__(self) -> int:
        return self.length

    def read(self, first: int, last: int) -> Iterator[TextDocument]:
        with self.blaming():
            for text in self.source.read(first, last):
                if not isinstance(text, str):
                    raise TypeError(f"read({first}, {last}) yields {shorten_foreign(text)} instead of text")
                self.tally.rows += 1
                yield from self.keep(TextDocument(text))

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ConfigError(f"{self.named}: {type(error).__name__}: {error}") from error


LANES = 192
"""Most lanes of a stream. Data-parallel ranks share the lanes evenly if their number divides that of the lanes, which
is always a divisor of this."""

CONNECTIONS = 32
"""Most lanes of a stream of the hub, each of which keeps a file open."""

LANE_DOCUMENTS = 16
"""Fewest documents in a lane of local files, so that lanes are about equally long."""

BLOCK = 1 << 20
"""Bytes of text that a lane of local files reads at a time, about."""

GROUP = 64
"""Rows that a lane of the hub reads at a time."""

WAITS = (1, 2, 4, 8, 16, 32)
"""Seconds before each new attempt after a network error."""


def count_lanes(most: int) -> int:
    """The largest divisor of `LANES` that is at most `most`, at least 1."""
    return max(lanes for lanes in range(1, LANES + 1) if LANES % lanes == 0 and lanes <= max(1, most))


class LocalStream:
    """Documents that can be read in any order, as a stream.

    A stream consists of `lanes`. Each lane is an endless sequence of documents that can be read on its own, and that
    begins with its own part of the corpus. When a lane has read its part, it goes on with the part of the next lane,
    and so on, so that in the long run all documents are read equally often. `circle` counts the turns in which a lane
    reads the whole corpus.

    Here, the documents are cut into `lanes` x `rounds` blocks of consecutive documents. Part p consists of the blocks
    p, p + lanes, p + 2 lanes, ... A turn is a block. max_damaged: the largest share of rows that may be left out.
    """

    def __init__(self, setting: str, documents: Documents, max_damaged: float):
        self.setting, self.documents, self.max_damaged = setting, documents, max_damaged
        self.count = len(documents)
        self.lanes = count_lanes(self.count // LANE_DOCUMENTS)
        self.rounds = max(1, min(self.count // self.lanes, math.ceil(documents.bytes / (BLOCK * self.lanes))))
        self.circle = self.lanes * self.rounds
        self.tally, self.told = RowTally(), 0

    def read_all(self) -> Iterator[TextDocument]:
        """All documents once, in their own order."""
        return self.documents.read(0, self.count)

    def read_lane(self, lane: int, turn: int, state: None) -> Iterator[tuple[int, None, list[TextDocument]]]:
        """The documents of a lane from its turn `turn` on, block by block: turn, state within the turn (here none),
        documents. Raises `ConfigError` or `DataError` for documents that cannot be read."""
        for number in itertools.count(turn):
            epoch, row = divmod(number, self.rounds)
            block = (lane + epoch) % self.lanes + self.lanes * row
            self.documents.take_tally()  # of what was read for another purpose
            found = list(self.documents.read(self._first(block), self._first(block + 1)))
            self._count_rows()
            yield number, None, found

    def _first(self, block: int) -> int:
        """The first document of a block: the first that does not begin inside of a document of a text file, where there
        is one."""
        first, end = (number * self.count // self.circle for number in (block, block + 1))
        whole = (number for number in range(first, min(end, self.count)) if not self.documents.begins_inside(number))
        return next(whole, first)

    def _count_rows(self) -> None:
        self.tally += self.documents.take_tally()
        damaged = self.tally.damaged
        found = f"{self.setting}: {damaged} of the {self.tally.rows} rows that this process has read cannot be read"
        if damaged and not self.documents.skip:
            raise DataError(
                f"{found}; set data.on_error=skip to leave them out, or mend them. The first: {self.tally.first}"
            )
        if damaged > self.max_damaged * max(self.tally.rows, self.count):
            raise DataError(
                f"{found}, more than data.max_damaged={self.max_damaged:g} allows; mend them, leave out the file, or "
                f"raise it. The first: {self.tally.first}"
            )
        self.told = report_left_out(self.setting, self.tally, self.told)


def report_left_out(setting: str, tally: RowTally, told: int) -> int:
    """Prints how many rows of a stream this process has left out, when that is more than twice as many as `told`.
    Returns the number that was told last. Nobody has counted them before the run."""
    left = tally.damaged + tally.empty
    if left <= 2 * told:
        return told
    first = f". The first: {tally.first}" if tally.first else ""
    print_notice(
        f"{setting}: this process left out {tally.damaged} damaged and {tally.empty} empty of {tally.rows} rows that "
        f"it read{first}"
    )
    return left


class HubStream(DamagedRows):
    """A data set of the hub as a stream, see `LocalStream`. Part p consists of the files p, p + lanes, p + 2 lanes, ...
    of the data set. A turn is such a part."""

    def __init__(self, setting: str, source: CorpusConfig, cache: Path, skip: bool = False):
        super().__init__(skip)
        self.setting, self.source, self.cache, self.told = setting, source, cache, 0

    @cached_property
    def dataset(self) -> Any:
        """The whole data set. Raises `ConfigError` where it cannot be opened or has no such column."""

        def load() -> Any:
            return load_hub(self.setting, self.source, self.cache, streaming=True)

        dataset = retry_network(f"{self.setting}: {self.source.path}", load)
        if dataset.column_names is not None:
            check_column(self.setting, self.source, dataset.column_names, dataset.features)
        return dataset

    @cached_property
    def lanes(self) -> int:
        """One where documents are counted off: a limit is that of the whole stream."""
        return 1 if self.source.limit else count_lanes(min(CONNECTIONS, self.dataset.num_shards))

    @property
    def circle(self) -> int:
        return self.lanes

    def read_all(self) -> Iterator[TextDocument]:
        for _, documents in self._read_part(0, 1, None):
            yield from documents

    def read_lane(
        self, lane: int, turn: int, state: dict[str, Any] | None
    ) -> Iterator[tuple[int, dict[str, Any] | None, list[TextDocument]]]:
        for number in itertools.count(turn):
            part, begin = (lane + number) % self.lanes, state if number == turn else None
            for before, documents in self._read_part(part, self.lanes, begin):
                yield number, before, documents

    def _read_part(
        self, part: int, parts: int, state: dict[str, Any] | None
    ) -> Iterator[tuple[dict[str, Any] | None, list[TextDocument]]]:
        """Groups of a part's documents from `state` on, each with the state before it. After a network error, the group
        is read again. Raises `DataError` where this fails again and again."""
        dataset = rows = None

        def read_group() -> list[dict]:
            nonlocal dataset, rows, state
            if rows is not None:
                state = dataset.state_dict()
            else:
                dataset = self.dataset.shard(parts, part, contiguous=False)
                dataset = dataset.take(self.source.limit) if self.source.limit else dataset
                if state is not None:
                    dataset.load_state_dict(state)
                rows = iter(dataset)
            try:
                return list(islice(rows, GROUP))
            except Exception:
                rows = None
                raise

        while True:
            try:
                group = retry_network(f"{self.setting}: the stream {self.source.path} broke off", read_group)
            except Exception as error:  # the network, or a reader of datasets, gave up
                ended, way_on = "cannot be read on", "mend the data set, or begin it anew with checkpoint.data=restart"
                if is_network_error(error):
                    ended, way_on = "broke off", "start the run again, it resumes there"
                raise DataError(
                    f"{self.setting}: the stream {self.source.path} {ended}: {shorten_foreign(error)}; {way_on}"
                ) from error
            documents = [document for row in group for document in self._documents(row)]
            self.told = report_left_out(self.setting, self.tally, self.told)
            yield state, documents
            if len(group) < GROUP:
                return

    def _documents(self, row: dict) -> Iterator[TextDocument]:
        if self.source.field not in row:
            check_column(self.setting, self.source, list(row), None)
        self.tally.rows += 1
        try:
            yield from self.keep(TextDocument(plain_text(row[self.source.field])))
        except ValueError as error:
            self.leave_out(
                ConfigError(
                    f"{self.setting}.field={self.source.field}: a row of the stream {self.source.path} {error}; "
                    "name another column, or leave out such rows with data.on_error=skip"
                )
            )


Stream = LocalStream | HubStream
"""Documents that are read while the run trains on them."""


def retry_network(named: str, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which is called again after network errors, with a growing pause before each call. Other
    errors, and that of the last call, are raised."""
    for wait in WAITS:
        try:
            return attempt()
        except Exception as error:  # each network layer below `datasets` has errors of its own
            if not is_network_error(error):
                raise
            print_notice(f"{named}: {shorten_foreign(error)}; it is tried again in {wait} s")
        time.sleep(wait * random.uniform(0.75, 1.25))  # ranks that failed together do not come back together
    return attempt()


PERMANENT = (FileNotFoundError, PermissionError, ValueError, TypeError, LookupError, NotImplementedError)
"""Errors that a new attempt does not mend: missing or damaged files."""


def is_network_error(error: BaseException | None) -> bool:
    """Whether a new attempt may succeed. Of a `ConfigError`, its cause is judged."""
    if isinstance(error, ConfigError):
        return error.__cause__ is not None and is_network_error(error.__cause__)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in (408, 425, 429)
    return not isinstance(error, PERMANENT) and "Offline" not in type(error).__name__


MakeCached = Callable[..., None]
"""Makes a file of the cache in the first process that needs it (`corpus._make_cached`)."""


class FetchedObjects:
    """Objects of a store as files of the cache, which are fetched when they are needed.

    The name of a file follows from the URL, the size and the version of its object, and of those that describe it (the
    index of a token file), which are fetched too. An object that has changed is therefore another file. paths: of the
    files, in the order of the objects' names. unread: a note of what is left out, or empty. Raises `ConfigError` where
    there is nothing to read."""

    def __init__(self, setting: str, source: CorpusConfig, cache: Path, most: int):
        self.store, self.folder = ObjectStore(f"{setting}.path", source.path or ""), cache / "objects"
        listed, suffixes = self.store.list(), SUFFIXES[source.kind]
        whole_folder = self.store.pattern is None and [found.name for found in listed] != [self.store.root]
        taken, left_out = [], []
        for found in listed:
            inner = found.name.removeprefix(self.store.root + "/").split("/")
            if whole_folder and any(SILENT.fullmatch(part) for part in inner):
                continue
            fits = not whole_folder or found.name.lower().endswith(suffixes)
            (taken if fits else left_out).append(found)
        if not taken:
            ends = f" that ends in {', '.join(suffixes)}" if suffixes[0] and whole_folder else ""
            raise StoreError(f"{self.store.named} finds no object{ends}; name an existing object, prefix or glob")
        if not any(found.size for found in taken):
            raise StoreError(f"{self.store.named} is empty: {len(taken)} objects of no bytes")
        others = {found.name: found for found in [*left_out, *self.store.unmatched]} if source.kind == "tokens" else {}
        self.paths: list[str] = []
        self.files: list[tuple[StoredObject, Path]] = []
        for found in taken[: most or None]:
            beside = {
                end: others[name]
                for end, whose in BESIDE.items()
                if found.name.endswith(whose) and (name := found.name.removesuffix(whose) + end) in others
            }
            place = self._place([found, *beside.values()])
            self.paths.append(str(place))
            self.files += [(found, place)]
            self.files += [(one, Path(f"{str(place).removesuffix(BESIDE[end])}{end}")) for end, one in beside.items()]
        self.identity = [[f"{self.store.scheme}://{one.name}", one.size, one.version] for one, _ in self.files]
        read = {one for one, _ in self.files}
        unread = [found.name for found in left_out if found not in read]
        self.unread = describe_unread(self.store.named, unread, [])

    def _place(self, found: list[StoredObject]) -> Path:
        digest = hashlib.blake2b(json.dumps([self.store.scheme, *found]).encode(), digest_size=12).hexdigest()
        return self.folder / f"{digest}-{re.sub(r'[^A-Za-z0-9._=+-]', '_', os.path.basename(found[0].name))[-100:]}"

    def fetch(self, once: MakeCached) -> None:
        """Makes the files exist. All but one process of a node wait meanwhile."""
        key = hashlib.blake2b(json.dumps(self.identity).encode(), digest_size=12).hexdigest()
        mark = self.folder / f"{key}.json"

        def missing() -> list[tuple[StoredObject, Path]]:
            return [(one, path) for one, path in self.files if not path.is_file() or path.stat().st_size != one.size]

        def make() -> None:
            needed = missing()
            size, free = sum(found.size for found, _ in needed), shutil.disk_usage(self.folder).free
            if size > free:
                raise StoreError(
                    f"{self.store.named} needs {size / 1e9:.2f} GB in {self.folder}, which has {free / 1e9:.2f} GB "
                    "free; set data.cache to a larger disk, or name fewer objects"
                )
            if needed:
                print_notice(f"fetching {len(needed)} objects ({size / 1e9:.2f} GB) of {self.store.url} ...")
            transfer_all(lambda one: self.store.fetch(*one), needed)
            write_atomic(mark, json.dumps(self.identity))

        if mark.exists() and missing():  # somebody has made room
            mark.unlink(missing_ok=True)
        once(mark, make)


Documents = TextFiles | JsonLines | ParquetRows | DatasetRows | OwnDocuments
"""Documents that can be read in any order."""


class DocumentSource:
    """One entry of data.sources or of eval.sets: what identifies its content, and its documents, opened when they are
    needed.

    section: the setting that has the entry; once: for files that are fetched; skip: leaves out rows that cannot be
    read; template: of conversations, to be set before these are opened. unread: a note of what the folder holds beyond
    the source's files, or empty. Raises `ConfigError` at once where files are missing, empty or not readable.
    """

    def __init__(
        self, section: str, name: str, config: CorpusConfig, cache: Path, once: MakeCached, skip: bool = False
    ):
        self.name, self.setting, self.config, self.cache, self.skip = name, f"{section}.{name}", config, cache, skip
        self.once = once
        self.template: ChatTemplate | None = None
        self.streams, self.registered = config.streaming, config.kind in SOURCES.registered
        most = config.limit if config.kind in ("stdlib", "text") else 0
        self.fetched: FetchedObjects | None = None
        self.listed, self.unread = list[str](), ""
        if config.kind in SUFFIXES and is_url(config.path):
            self.fetched = FetchedObjects(self.setting, config, cache, most)
            self.listed, self.unread = self.fetched.paths, self.fetched.unread
        elif config.kind != "hub" and not self.registered:
            self.listed, self.unread = find_files(self.setting, config)
        self.listed = self.listed[: most or None]

    @cached_property
    def paths(self) -> list[str]:
        """The files of the source, which exist."""
        if self.fetched:
            self.fetched.fetch(self.once)
        return self.listed

    @cached_property
    def identity(self) -> list[Any]:
        """Changes with the content: names, sizes and times of files, names, sizes and versions of objects, or the files
        that the hub lists for a data set; of a stream, their number."""
        config = self.config
        reading = [config.kind, config.messages if config.kind == "chat" else config.field, config.limit]
        if config.kind == "hub":
            if self.streams:
                return [*reading, config.path, config.subset, config.split, self.documents.dataset.num_shards]
            files = [entry["filename"] for entry in self.documents.rows.cache_files]
            return [*reading, config.path, config.subset, config.split, files]
        if self.registered:
            return [*reading, config.settings, self.documents.identity]
        if self.fetched:  # not by the time of the copy: all nodes have to agree
            return [*reading, self.fetched.identity]
        states = [(path, os.stat(path)) for path in self.paths]
        return [*reading, [(path, state.st_size, state.st_mtime_ns) for path, state in states]]

    @cached_property
    def documents(self) -> Documents | HubStream:
        setting, config = self.setting, self.config
        if self.registered:
            return OwnDocuments(setting, config)
        if config.kind in ("stdlib", "text"):
            return TextFiles(setting, self.paths, strict=config.kind == "text", skip=self.skip)
        if config.kind in ("jsonl", "parquet", "chat"):
            tables = [path.lower().endswith(PARQUET) for path in self.paths]
            if config.kind == "chat" and any(tables) != all(tables):
                raise ConfigError(
                    f"{setting}.path={config.path} holds both JSON and Parquet; name one kind with a glob, and give "
                    "the other an entry of its own"
                )
            options = {"skip": self.skip, "template": self.template}
            if config.kind == "parquet" or config.kind == "chat" and all(tables):
                return ParquetRows(setting, self.paths, config, **options)
            return JsonLines(setting, self.paths, config, self.cache / "expanded", **options)
        return (
            HubStream(setting, config, self.cache, self.skip)
            if self.streams
            else DatasetRows(setting, load_hub(setting, config, self.cache), config, self.skip)
        )

    def sample_texts(self, size: int) -> Iterator[str]:
        """About `size` bytes of text, spread over the documents (a stream's first ones), to train a tokenizer on."""
        if isinstance(self.documents, HubStream):
            for text, *_ in self.documents.read_all():
                yield text
                size -= len(text)
                if size <= 0:
                    return
        else:
            stride = max(1, math.ceil(self.documents.bytes / size))
            for number in range(0, len(self.documents), stride):
                yield from (document.text for document in self.documents.read(number, number + 1))


def walk_files(named: str, root: str) -> Iterator[str]:
    """All files under a folder, except in hidden folders. A linked folder is entered once, unless its files are found
    elsewhere under `root`. Raises `ConfigError` for links out of the folder, and for folders that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{named}: {error.filename} cannot be listed: {error.strerror}") from error

    waiting, seen = [root], set()
    for start in waiting:
        for folder, folders, files in os.walk(start, onerror=refuse):
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            links = [path for path in (os.path.join(folder, name) for name in folders) if os.path.islink(path)]
            check_inside(named, root, links)
            waiting += links  # os.walk does not follow them
            yield from (os.path.join(folder, file) for file in sorted(files))


def check_inside(named: str, root: str, links: list[str]) -> None:
    """Raises `ConfigError` for a symbolic link out of the folder."""
    for path in links:
        if leads_out(root, path):
            raise ConfigError(
                f"{named}: {on_one_line(path)} is a link out of the folder; put the file itself there, or name "
                f"the files by a glob ({os.path.join(root, '**')}), which follows links"
            )


def find_files(setting: str, source: CorpusConfig) -> tuple[list[str], str]:
    """The files of a source, sorted, and a note that names what its folder or glob holds beyond them. Raises
    `ConfigError` if there is none or one cannot be read."""
    paths: list[str] = []
    others: list[str] = []
    if source.kind == "stdlib":
        library = sysconfig.get_paths()["stdlib"]
        named = f"{setting}: the standard library in {library}"
        for folder, folders, files in os.walk(library):
            folders[:] = set(folders) - NOT_LIBRARY
            paths += [os.path.join(folder, file) for file in files if file.endswith(".py")]
        hint = "this interpreter ships no sources; use data=text"
    else:
        path, suffixes = os.path.expanduser(source.path or ""), SUFFIXES[source.kind]
        named, hint = f"{setting}.path={source.path}", "name an existing file, folder or glob"
        if os.path.isdir(path):
            tables = [kind for name, kind in TABLES.items() if os.path.isdir(os.path.join(path, name))]
            if tables and source.kind != "text":
                raise ConfigError(
                    f"{named} is a table of {tables[0]}, whose log says which of its files still belong to it, and "
                    "is not read; write the table to Parquet files, or name its files by a glob"
                )
            others = [entry for entry in walk_files(named, path) if not SILENT.fullmatch(os.path.basename(entry))]
            paths = [entry for entry in others if entry.lower().endswith(suffixes)]
            links = [entry for entry in paths if os.path.islink(entry)]
            if lost := [entry for entry in links if not os.path.exists(entry)]:
                raise ConfigError(f"{named}: {on_one_line(lost[0])} is a link to nothing; remove it, or mend it")
            check_inside(named, path, links)
            paths = [entry for entry in paths if os.path.isfile(entry)]
            hint = f"the folder holds no file{' that ends in ' + ', '.join(suffixes) if suffixes[0] else ''}"
        else:
            others = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
            paths = [entry for entry in others if os.path.isfile(entry)]
            parents = {parent for entry in paths for parent in parent_folders(entry)}
            others = [entry for entry in others if entry.rstrip(os.sep) not in parents]
    if not paths:
        more = f"; it holds {summarise_files(others)}" if others else ""
        raise ConfigError(f"{named} finds no file; {hint}{more}")
    refused = [path for path in paths if not os.access(path, os.R_OK)]
    if refused:
        more = " and more" if len(refused) > 3 else ""
        raise ConfigError(f"{named}: no permission to read {', '.join(refused[:3])}{more}")
    empty = [path for path in paths if not os.path.getsize(path)]
    if len(empty) == len(paths):
        raise ConfigError(f"{named} is empty: {len(paths)} file{'s' * (len(paths) > 1)} of no bytes")
    taken = {*paths}
    others = [entry for entry in others if entry not in taken and not describes_tokens(entry, taken)]
    if source.kind == "stdlib":  # empty modules of packages, which nobody misses
        empty = []
    return sorted(os.path.abspath(path) for path in paths), describe_unread(named, others, empty)


def parent_folders(path: str) -> Iterator[str]:
    """The folders that a path leads through."""
    while (parent := os.path.dirname(path)) not in (path, ""):
        yield (path := parent)


def describes_tokens(path: str, files: set[str]) -> bool:
    """Whether a file describes a token file among `files`."""
    return any(path.endswith(end) and path.removesuffix(end) + whose in files for end, whose in BESIDE.items())


def describe_unread(named: str, others: list[str], empty: list[str]) -> str:
    """A note of files that are not read, and of files of no bytes; empty where there is none."""
    parts = [f"not read: {summarise_files(others)}"] if others else []
    parts += [f"of no bytes: {summarise_files(empty)}"] if empty else []
    return f"{named}: {'; '.join(parts)}" if parts else ""


def summarise_files(paths: list[str]) -> str:
    """How many files there are by what their names end in, with the first names of each kind."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        name = os.path.basename(path.rstrip(os.sep))
        ends = name.rsplit(".", 2 if name.endswith(PACKED) else 1)[1:]
        kind = "folders" if os.path.isdir(path) else f".{'.'.join(ends)}".lower() if ends else "without extension"
        kinds.setdefault(on_one_line(kind), []).append(on_one_line(name))
    told = [
        f"{len(names)} {kind} ({', '.join(names[:2])}{', ...' * (len(names) > 2)})"
        for kind, names in sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    ]
    return ", ".join(
        [*told[:NAMED_KINDS], *([f"{len(told) - NAMED_KINDS} more kinds"] if len(told) > NAMED_KINDS else [])]
    )


def load_hub(setting: str, source: CorpusConfig, cache: Path, streaming: bool = False) -> Any:
    """A data set of the hub opened by `datasets`, whose errors become `ConfigError`. Since version 4 it runs no code
    that comes with a data set."""
    import datasets

    if not on_terminal():
        datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(source.path, name=source.subset, cache_dir=str(cache / "datasets"))
        check_data_files(source, builder)
        if streaming:
            return builder.as_streaming_dataset(split=source.split)
        builder.download_and_prepare()
        return builder.as_dataset(split=source.split)
    except Exception as error:  # datasets passes on whatever its readers and its network layer raise
        raise ConfigError(
            f"{setting}.path={source.path} cannot be opened: {shorten_foreign(error.__cause__ or error)}; check path, "
            "subset and split, or the network"
        ) from error


def check_data_files(source: CorpusConfig, builder: Any) -> None:
    """Raises `ValueError` for a data set whose description (`data_files` in its README.md) names files elsewhere: on
    this machine outside its folder, or in another data set, which only this user may be allowed to read."""
    folder, repository = os.path.expanduser(source.path or ""), getattr(builder, "repo_id", None)
    for file in (str(file) for files in (builder.config.data_files or {}).values() for file in files):
        place = file.split("::")[-1]
        if os.path.isdir(folder):
            elsewhere = "://" in place or leads_out(folder, place)
        else:
            elsewhere = repository is not None and not place.startswith(f"hf://datasets/{repository}@")
        if elsewhere:
            raise ValueError(
                f"its description names {on_one_line(file)}, which is not in it; remove that from its data_files"
            )


def check_column(setting: str, source: CorpusConfig, columns: list[str], features: Any) -> None:
    """Raises `ConfigError` unless the source's column exists and holds text."""
    named = f"{setting}.field={source.field}"
    if source.field not in columns:
        raise ConfigError(f"{named} is no column of {source.path}; {suggest_nearest(source.field, columns)}")
    kind = getattr(features[source.field], "dtype", None) if features else "string"
    if kind not in ("string", "large_string", "string_view", "null"):
        held = kind or features[source.field]
        raise ConfigError(f"{named} holds {held} instead of text; columns: {', '.join(columns)}")


def digest_text(text: str) -> int:
    """A 64-bit hash of a document's content: equal documents fall on the same side of the held-out split."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def held_out_threshold(documents: Documents | HubStream, fraction: float) -> int:
    """Documents whose `digest_text` is below this are held out: all if `fraction` is 1; else at least one, never all,
    where documents can be counted."""
    if fraction in (0, 1) or isinstance(documents, HubStream) or len(documents) > COUNTED:
        return int(fraction * 2**64)
    found = set()
    for number, document in enumerate(documents.read(0, len(documents))):
        if number == COUNTED:
            return int(fraction * 2**64)
        if document.text:
            found.add(digest_text(document.text))
    digests = sorted(found)
    count = min(math.ceil(fraction * len(digests)), len(digests) - 1)
    return digests[count] if digests else 0
