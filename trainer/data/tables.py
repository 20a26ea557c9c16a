"""Rows of JSON Lines and of Parquet files, one document each, read in place and within limits.

Whoever wrote such a file decides how large it becomes when it is read. What it can take of memory and disk is therefore
bounded: by the size of the file itself (`allowed_bytes`), and by the longest document (`LINE`)."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trainer.config import ConfigError, CorpusConfig
from trainer.config.fields import suggest_nearest
from trainer.data.text import (
    LINE,
    OPTIONS,
    Absent,
    ChatTemplate,
    DamagedRows,
    RowTally,
    TextDocument,
    TextFiles,
    check_names,
    plain_text,
)
from trainer.data.tokens import locate_index
from trainer.util.reading import on_one_line, parse_json, read_bytes, replace_file, shorten_foreign

EXPANSION = 100
"""How many times its own size a file may become. Text shrinks to a third or a tenth, logs to a fiftieth; what is made
to fill a disk shrinks to a thousandth with gzip, and to far less with the others."""

ALWAYS = 64 << 20
"""Bytes that a file may become whatever its size: a small file of equal lines does no harm."""

ARRAY = 256 << 20
"""Bytes of a JSON file that holds one array instead of lines, and therefore has to be parsed whole."""

PIECE = 1 << 20
"""Bytes decompressed at a time."""

ROWS = 64
"""Rows of Parquet decoded at a time."""

MAGIC = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0", "zstd": (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")}
"""How compressed files begin; their names say nothing. pzstd puts the size of a frame in front of it."""


def allowed_bytes(path: str) -> int:
    """Bytes that a file may become when it is read."""
    return max(ALWAYS, EXPANSION * os.path.getsize(path))


class TableColumn(NamedTuple):
    """The column of a table that holds the documents: of text, or with a template of conversations. setting: that names
    it."""

    name: str
    setting: str
    template: ChatTemplate | None

    @classmethod
    def of(cls, setting: str, source: CorpusConfig, template: ChatTemplate | None) -> TableColumn:
        name, field = (source.field, "field") if template is None else (source.messages, "messages")
        return cls(name, f"{setting}.{field}", template)

    def document(self, row: dict[str, Any], tally: RowTally) -> TextDocument:
        """What is made of a row. What it has besides is counted in `tally`. Raises `ValueError` with what is wrong."""
        value = row.get(self.name)
        if self.template is None:
            tally.count_unread(name for name in row if name != self.name)
            return TextDocument(plain_text(value))
        if value is None or value == []:
            raise Absent("holds no messages")
        document = self.template.document(value, {name: item for name, item in row.items() if name != self.name})
        tally.count_unread(document.unread)
        return document

    def missing(self, path: str, names: list[str]) -> ConfigError:
        """The error for a file that has other columns."""
        return ConfigError(
            f"{self.setting}={self.name} is no column of {path}; {suggest_nearest(self.name, names)}"
            + "; a pair of prompt and answer is written as a list of messages of user and assistant"
            * bool(self.template)
        )


class JsonLines(TextFiles):
    """JSON Lines, a document a line; `len` and `read` count chunks of the files, as in `TextFiles`.

    Files that are compressed, or hold one array, are written to the folder `expanded` as lines first."""

    def __init__(
        self,
        setting: str,
        paths: list[str],
        source: CorpusConfig,
        expanded: Path,
        skip: bool = False,
        template: ChatTemplate | None = None,
    ):
        self.column, self.original = TableColumn.of(setting, source, template), {}
        for path in paths:
            self.original.setdefault(as_lines(setting, path, expanded), path)
        super().__init__(setting, list(self.original), strict=True, skip=skip)
        if source.limit:
            self.keep_lines(source.limit)
        list(self.read(0, min(1, len(self))))  # a wrong column is found before anything is prepared

    def begins_inside(self, number: int) -> bool:
        return False

    def read(self, first: int, last: int) -> Iterator[TextDocument]:
        """The documents of the lines that start in these chunks. Raises `ConfigError` naming file and line, unless such
        lines are skipped."""
        name = self.column.name
        for chunk in range(first, last):
            rows = list(self._rows(chunk))
            if rows and self.locate(chunk)[1] == 0 and not any(name in row for row, _ in rows):
                names = list(dict.fromkeys(name for row, _ in rows for name in row))
                raise self.column.missing(self.original[rows[0][1][0]], names)
            for row, place in rows:
                try:
                    yield from self.keep(self.column.document(row, self.tally))
                except ValueError as error:
                    problem = self._error(place, f"{error} in {self.column.setting}={name}")
                    self.leave_out(problem, absent=isinstance(error, Absent))

    def _rows(self, chunk: int) -> Iterator[tuple[dict[str, Any], tuple[str, int]]]:
        """The object of each line that is not blank, and its file and byte."""
        file, number = self.locate(chunk)
        offset, data = self.lines(file, number)
        for line in data.split(b"\n"):
            place = self.paths[file], offset
            offset += len(line) + 1
            if line.strip():
                self.tally.rows += 1
                try:
                    row = parse_json(line.decode("utf-8" if place[1] else "utf-8-sig"), exact=True)
                except ValueError as error:
                    self.leave_out(self._error(place, f"is not JSON: {shorten_foreign(error)}"))
                    continue
                if isinstance(row, dict):
                    yield row, place
                else:
                    self.leave_out(self._error(place, f"holds {shorten_foreign(row)} instead of an object"))

    def _error(self, place: tuple[str, int], problem: str) -> ConfigError:
        path, offset = place
        unpacked = "" if path == self.original[path] else " of what it expands to"
        return ConfigError(
            f"{self.setting}.path: {self.original[path]}, the line at byte {offset}{unpacked}, {problem}; each file "
            "must be valid JSON, one object a line; data.on_error=skip leaves out lines that cannot be read"
        )


def as_lines(setting: str, path: str, folder: Path) -> str:
    """The file itself where it holds plain lines; else one in `folder` with the lines that it expands to.

    Raises `ConfigError` for a file that expands beyond `allowed_bytes`, or cannot be read."""
    state, named = os.stat(path), f"{setting}.path: {path}"
    key = hashlib.blake2b(f"{path} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=12).hexdigest()
    try:
        with open(path, "rb") as file:
            head = file.read(8)
        kind = next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), None)
        lines = path if kind is None else str(folder / f"{key}.jsonl")
        if kind and not os.path.exists(lines):
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(lines) as part:
                _decompress(path, kind, part, named)
        with open(lines, "rb") as file:
            if file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
                return lines
        rows = parse_json(read_bytes(lines, ARRAY), exact=True)
        lines = str(folder / f"{key}.array.jsonl")
        folder.mkdir(parents=True, exist_ok=True)
        with replace_file(lines) as part, open(part, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return lines
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{named} cannot be opened: {shorten_foreign(error)}; each file must be valid JSON, one object a line"
        ) from error


def _decompress(path: str, kind: str, target: str, named: str) -> None:
    done, most = 0, allowed_bytes(path)
    with open_compressed(path, kind) as packed, open(target, "wb") as plain:
        while piece := packed.read(PIECE):
            done += len(piece)
            if done > most:
                raise ConfigError(
                    f"{named} expands to more than {most} bytes, {EXPANSION} times its size and more than any text "
                    "does; leave it out, or decompress it yourself if it is what you want"
                )
            plain.write(piece)


def open_compressed(path: str, kind: str) -> BinaryIO:
    """A compressed file for reading, which raises for a stream that is damaged, wherever in the file it begins."""
    if kind == "zstd":
        import pyarrow

        return pyarrow.input_stream(path, kind)
    packed: Any = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}[kind](path)
    packed._buffer.raw._trailing_error = ()  # else it would end where a stream does not begin as one
    return packed


class ParquetRows(DamagedRows):
    """Parquet files, a document a row; only the column with the documents is read, and `OPTIONS` of conversations."""

    def __init__(
        self,
        setting: str,
        paths: list[str],
        source: CorpusConfig,
        skip: bool = False,
        template: ChatTemplate | None = None,
    ):
        super().__init__(skip)
        self.setting, self.column = setting, TableColumn.of(setting, source, template)
        self.groups: list[tuple[str, int]] = []
        self.names: dict[str, list[str]] = {}
        rows, self.bytes = [], 0
        for path in paths:
            for group, (count, size) in enumerate(self._checked(path)):
                self.groups.append((path, group))
                rows.append(count)
                self.bytes += size
        self._ends = np.cumsum(rows, dtype=np.int64)
        self.length = int(self._ends[-1]) if rows else 0
        if source.limit and source.limit < self.length:
            self.bytes = self.bytes * source.limit // self.length
            self.length = source.limit

    def __len__(self) -> int:
        return self.length

    def read(self, first: int, last: int) -> Iterator[TextDocument]:
        """The documents of these rows. Raises `ConfigError` for a file that cannot be decoded, or holds less than it
        says, unless the rows that this concerns are skipped."""
        while first < last:
            group, row = locate_index(self._ends, first)
            count = min(last, int(self._ends[group])) - first
            self.tally.rows += count
            path = self.groups[group][0]
            self.tally.count_unread(sorted({*self.names[path]} - {*self._read_columns(path)}), count)
            yield from self._decoded(*self.groups[group], row, row + count)
            first += count

    def _decoded(self, path: str, group: int, first: int, last: int) -> Iterator[TextDocument]:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        row, held, most = 0, 0, allowed_bytes(path)
        try:
            with ParquetFile(path) as file:
                columns = self._read_columns(path)
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False):
                    held += batch.nbytes
                    if held > most or batch.nbytes > ROWS * LINE:
                        raise self._error(path, f"expands to more than {most} bytes, more than any text does")
                    wanted = batch[max(0, first - row) : last - row] if row + len(batch) > first else batch[:0]
                    for number in range(len(wanted)):
                        place = f"{path}, row {max(row, first) + number} of row group {group},"
                        yield from self._documents(wanted, number, place)
                    row += len(batch)
                    if row >= last:
                        return
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            problem = self._error(path, f"cannot be decoded: {shorten_foreign(error)}")
        else:
            problem = self._error(path, f"has {row} rows in row group {group}, fewer than it says")
        self.leave_out(problem, last - max(row, first))

    def _documents(self, batch: Any, number: int, place: str) -> Iterator[TextDocument]:
        try:
            try:
                row = {name: plain_value(batch[name][number]) for name in batch.schema.names}
            except ValueError as error:
                raise ValueError(shorten_foreign(error)) from None
            yield from self.keep(self.column.document(row, self.tally))
        except ValueError as error:
            problem = self._error(place, f"{error} in {self.column.setting}={self.column.name}")
            self.leave_out(problem, absent=isinstance(error, Absent))

    def _read_columns(self, path: str) -> list[str]:
        options = OPTIONS if self.column.template else ()
        return [name for name in self.names[path] if name == self.column.name or name in options]

    def _checked(self, path: str) -> list[tuple[int, int]]:
        """Rows and bytes of each row group, after what the file says of itself has been checked."""
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(path) as file:
                self._check_columns(path, file.schema_arrow)
                columns = tuple(f"{name}." for name in self._read_columns(path))
                paths = [f"{file.schema.column(index).path}." for index in range(len(file.schema))]
                leaves = [index for index, leaf in enumerate(paths) if leaf.startswith(columns)]
                groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
                found = [
                    (group.num_rows, sum(group.column(leaf).total_uncompressed_size for leaf in leaves))
                    for group in groups
                ]
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, IndexError) as error:
            raise self._error(path, f"cannot be opened: {shorten_foreign(error)}") from error
        rows, size, most = sum(rows for rows, _ in found), sum(size for _, size in found), allowed_bytes(path)
        if size > most or rows > 8 * most or any(number < 0 for group in found for number in group):
            raise self._error(path, f"says that it expands to {size} bytes in {rows} rows, more than any text does")
        return found

    def _check_columns(self, path: str, schema: Any) -> None:
        from pyarrow import types

        name, self.names[path] = self.column.name, schema.names
        named = f"{self.column.setting}={name}"
        if name not in schema.names:
            raise self.column.missing(path, schema.names)
        for several in self._read_columns(path):
            if schema.names.count(several) > 1:
                raise ConfigError(f"{named}: {path} has several columns {several}; give each a name of its own")
        if self.column.template:
            try:
                check_names(set(schema.names) - {name})
            except ValueError as error:
                raise ConfigError(f"{named}: {path} {error}") from None
        kind = schema.field(name).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        texts = types.is_string, types.is_large_string, types.is_string_view
        sizes = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
        lists = [getattr(types, f"is_{size}") for size in sizes]
        wanted, instead = (lists, "a list of messages") if self.column.template else (texts, "text")
        if not any(fits(kind) for fits in (*wanted, types.is_null)):
            raise ConfigError(
                f"{named} holds {on_one_line(str(kind))} instead of {instead} in {path}; columns: "
                f"{on_one_line(', '.join(schema.names))}"
            )

    def _error(self, path: str, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.setting}.path: {path} {problem}; each file must be valid Parquet; leave it out, write it anew, or "
            "leave out the rows that cannot be read with data.on_error=skip"
        )


def plain_value(scalar: Any) -> Any:
    """A value of a Parquet column without the nulls in structs. All structs of a column have the same keys, so that a
    null says that the row has no such key. Nulls in lists and maps are kept."""
    return drop_filled(scalar.as_py(maps_as_pydicts="strict"), scalar.type)


def drop_filled(value: Any, kind: Any) -> Any:
    """A value of an Arrow type without the nulls in structs."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        return {item.name: drop_filled(value[item.name], item.type) for item in kind if value[item.name] is not None}
    if types.is_map(kind):
        return {key: drop_filled(item, kind.item_type) for key, item in value.items()}
    return [drop_filled(item, kind.value_type) for item in value] if isinstance(value, list) else value
