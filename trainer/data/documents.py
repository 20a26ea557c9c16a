"""The documents of one source: files, or data sets of the hub through `datasets`; and which are held out."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import math
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, CorpusConfig
from trainer.config.fields import suggest_nearest
from trainer.config.registry import SOURCES
from trainer.data.tables import JsonLines, ParquetRows
from trainer.data.text import ChatTemplate, DamagedRows, TextDocument, TextFiles
from trainer.data.tokens import DataError, on_terminal, print_notice
from trainer.util.objects import ObjectStore, StoredObject, StoreError, is_url, transfer_all
from trainer.util.reading import leads_out, on_one_line, shorten_foreign, write_atomic

COUNTED = 10_000
"""Up to this many documents exactly the held-out share is held out; above, a threshold on hashes is close enough."""

JSON = tuple(f".json{lines}{packed}" for packed in ("", ".gz", ".zst", ".xz", ".bz2") for lines in ("l", ""))
SUFFIXES = {
    "text": None,
    "jsonl": JSON,
    "parquet": (".parquet",),
    "chat": (*JSON, ".parquet"),
    "tokens": (".bin", ".npy"),
}
"""What a folder of each kind is searched for; None means every file."""

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders in the standard library's folder that are left out: other packages, and tests, which some systems lack."""


class DatasetRows(DamagedRows):
    """Rows of a `datasets.Dataset`, one document each."""

    def __init__(self, setting: str, dataset: Any, source: CorpusConfig):
        super().__init__(skip=False)
        check_column(setting, source, dataset.column_names, dataset.features)
        self.rows = dataset.select_columns([source.field])
        self.field, self.length = source.field, min(len(dataset), source.limit or len(dataset))
        self.bytes = dataset.data.nbytes * self.length // max(1, len(dataset))

    def __len__(self) -> int:
        return self.length

    def read(self, first: int, last: int) -> Iterator[TextDocument]:
        for start in range(first, last, 256):
            for text in self.rows[start : min(start + 256, last)][self.field]:
                if text:
                    yield TextDocument(text)


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
                if text:
                    yield TextDocument(text)

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ConfigError(f"{self.named}: {type(error).__name__}: {error}") from error


class HubStream:
    """Documents of a hub data set in the order in which they arrive."""

    def __init__(self, name: str, setting: str, source: CorpusConfig, cache: Path):
        self.name, self.setting, self.source, self.cache = name, setting, source, cache

    def open(self) -> Any:
        """A fresh `datasets.IterableDataset` at its first document."""
        dataset = load_hub(self.setting, self.source, self.cache, streaming=True)
        if dataset.column_names is not None:
            check_column(self.setting, self.source, dataset.column_names, dataset.features)
        return dataset.take(self.source.limit) if self.source.limit else dataset

    def rows(self, dataset: Any) -> Iterator[dict]:
        """The rows of an opened data set. Raises `DataError` when it breaks off."""
        try:
            yield from dataset
        except Exception as error:  # the network, or a reader of datasets, gave up
            raise DataError(
                f"{self.setting}: the stream {self.source.path} broke off: {error}; start the run again, it "
                "resumes there"
            ) from error

    def texts(self, rows: Iterable[dict]) -> Iterator[str]:
        for row in rows:
            if self.source.field not in row:
                check_column(self.setting, self.source, list(row), None)
            if text := row[self.source.field]:
                if not isinstance(text, str):
                    raise ConfigError(
                        f"{self.setting}.field={self.source.field} holds {shorten_foreign(text)} instead of text in "
                        f"the stream {self.source.path}; name another column"
                    )
                yield text


MakeCached = Callable[..., None]
"""Makes a file of the cache in the first process that needs it (`corpus._make_cached`)."""


class FetchedObjects:
    """Objects of a store as files of the cache, which are fetched when they are needed.

    The name of a file follows from the URL, the size and the version of its object. An object that has changed is
    therefore another file. paths: of the files, in the order of the objects' names. notes: what is left out. Raises
    `ConfigError` where there is nothing to read."""

    def __init__(self, setting: str, source: CorpusConfig, cache: Path, most: int):
        self.store = ObjectStore(f"{setting}.path", source.path or "")
        listed, suffixes = self.store.list(), SUFFIXES[source.kind]
        whole_folder = self.store.pattern is None and [found.name for found in listed] != [self.store.root]
        self.objects, left_out = [], []
        for found in listed:
            inner = found.name.removeprefix(self.store.root + "/").split("/")
            hidden = whole_folder and any(part.startswith(".") for part in inner)
            fits = not hidden and (not whole_folder or suffixes is None or found.name.endswith(suffixes))
            (self.objects if fits else left_out).append(found)
        if not self.objects:
            ends = f" that ends in {', '.join(suffixes)}" if suffixes and whole_folder else ""
            raise StoreError(f"{self.store.named} finds no object{ends}; name an existing object, prefix or glob")
        if not any(found.size for found in self.objects):
            raise StoreError(f"{self.store.named} is empty: {len(self.objects)} objects of no bytes")
        self.notes = []
        if left_out:
            names = ", ".join(on_one_line(found.name) for found in left_out[:3]) + ", ..." * (len(left_out) > 3)
            self.notes = [f"{self.store.named}: {len(left_out)} of {len(listed)} objects are left out: {names}"]
        self.objects = self.objects[: most or None]
        self.identity = [[f"{self.store.scheme}://{name}", size, version] for name, size, version in self.objects]
        self.folder = cache / "objects"
        self.paths = [str(self._place(found)) for found in self.objects]

    def _place(self, found: StoredObject) -> Path:
        digest = hashlib.blake2b(json.dumps([self.store.scheme, *found]).encode(), digest_size=12).hexdigest()
        return self.folder / f"{digest}-{re.sub(r'[^A-Za-z0-9._=+-]', '_', os.path.basename(found.name))[-100:]}"

    def fetch(self, once: MakeCached) -> None:
        """Makes the files exist. All but one process of a node wait meanwhile."""
        key = hashlib.blake2b(json.dumps(self.identity).encode(), digest_size=12).hexdigest()
        mark = self.folder / f"{key}.json"

        def missing() -> list[tuple[StoredObject, Path]]:
            places = ((found, Path(path)) for found, path in zip(self.objects, self.paths))
            return [(found, path) for found, path in places if not path.is_file() or path.stat().st_size != found.size]

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
    read; template: of conversations, to be set before these are opened. notes: what is to be said of the files. Raises
    `ConfigError` at once where files are missing, empty or not readable.
    """

    def __init__(
        self, section: str, name: str, config: CorpusConfig, cache: Path, once: MakeCached, skip: bool = False
    ):
        self.name, self.setting, self.config, self.cache, self.skip = name, f"{section}.{name}", config, cache, skip
        self.once = once
        self.template: ChatTemplate | None = None
        self.streams = config.kind == "hub" and config.streaming
        self.registered = config.kind in SOURCES.registered
        most = config.limit if config.kind in ("stdlib", "text") else 0
        self.fetched: FetchedObjects | None = None
        if config.kind in SUFFIXES and is_url(config.path):
            self.fetched = FetchedObjects(self.setting, config, cache, most)
        self.notes = self.fetched.notes if self.fetched else []
        found = config.kind != "hub" and not self.registered and not self.fetched
        self.listed = self.fetched.paths if self.fetched else find_files(self.setting, config) if found else []
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
        that the hub lists for a data set."""
        config = self.config
        reading = [config.kind, config.messages if config.kind == "chat" else config.field, config.limit]
        if config.kind == "hub":
            files = [] if self.streams else [entry["filename"] for entry in self.documents.rows.cache_files]
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
            tables = [path.endswith(".parquet") for path in self.paths]
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
            HubStream(self.name, setting, config, self.cache)
            if self.streams
            else DatasetRows(setting, load_hub(setting, config, self.cache), config)
        )

    def sample_texts(self, size: int) -> Iterator[str]:
        """About `size` bytes of text, spread over the documents (a stream's first ones), to train a tokenizer on."""
        if self.streams:
            for text in self.documents.texts(self.documents.rows(self.documents.open())):
                yield text
                size -= len(text)
                if size <= 0:
                    return
        else:
            stride = max(1, math.ceil(self.documents.bytes / size))
            for number in range(0, len(self.documents), stride):
                yield from (document.text for document in self.documents.read(number, number + 1))


def walk_files(root: str | Path, enter: Callable[[str], bool]) -> Iterator[str]:
    """All files under a folder, except in folders for whose name `enter` returns False."""
    for folder, folders, files in os.walk(root):
        folders[:] = filter(enter, folders)
        yield from (os.path.join(folder, file) for file in files)


def find_files(setting: str, source: CorpusConfig) -> list[str]:
    """The files of a source, sorted. Raises `ConfigError` if there is none or one cannot be read."""
    if source.kind == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in walk_files(library, lambda folder: folder not in NOT_LIBRARY) if path.endswith(".py")]
        named = f"{setting}: the standard library in {library}"
        hint = "this interpreter ships no sources; use data=text"
    else:
        path, suffixes = os.path.expanduser(source.path or ""), SUFFIXES[source.kind]
        named, hint = f"{setting}.path={source.path}", "name an existing file, folder or glob"
        if os.path.isdir(path):
            paths = [
                entry
                for entry in walk_files(path, lambda folder: not folder.startswith("."))
                if (suffixes is None or entry.endswith(suffixes))
                and not os.path.basename(entry).startswith(".")
                and os.path.isfile(entry)
            ]
            if links := [entry for entry in paths if os.path.islink(entry) and leads_out(path, entry)]:
                raise ConfigError(
                    f"{named}: {on_one_line(links[0])} is a link out of the folder; put the file itself there, or name "
                    f"the files by a glob ({os.path.join(path, '**')}), which follows links"
                )
            hint = f"the folder holds no file{' that ends in ' + ', '.join(suffixes) if suffixes else ''}"
        else:
            found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
            paths = [entry for entry in found if os.path.isfile(entry)]
    if not paths:
        raise ConfigError(f"{named} finds no file; {hint}")
    refused = [path for path in paths if not os.access(path, os.R_OK)]
    if refused:
        more = " and more" if len(refused) > 3 else ""
        raise ConfigError(f"{named}: no permission to read {', '.join(refused[:3])}{more}")
    if not any(os.path.getsize(path) for path in paths):
        raise ConfigError(f"{named} is empty: {len(paths)} file{'s' * (len(paths) > 1)} of no bytes")
    return sorted(os.path.abspath(path) for path in paths)


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
    if kind not in ("string", "large_string", "null"):
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
