"""A data source that reads the rows of a table of SQLite, one document each:

    trainer train +config=debug imports=[examples.sqlite_rows] data.sources.stdlib.kind=sqlite \\
        data.sources.stdlib.settings.sqlite.file=FILE.db
"""

import os
import sqlite3
from dataclasses import dataclass

from trainer import option, register


@dataclass
class Settings:
    file: str = option("", "the database")
    table: str = option("documents", "its table, whose rows are documents in the order of their rowids")
    column: str = option("text", "the column that holds the text")

    def __post_init__(self):
        for name in (self.table, self.column):
            if not name.isidentifier():  # it becomes a part of the query
                raise ValueError(f"'{name}' is no name of a table or column")


@register.data_source("sqlite", Settings)
class Sqlite:
    def __init__(self, settings):
        self.settings = settings
        self.database = sqlite3.connect(f"file:{settings.file}?mode=ro", uri=True, check_same_thread=False)
        self.rows = [row for (row,) in self.database.execute(f"SELECT rowid FROM {settings.table} ORDER BY rowid")]

    def __len__(self):
        return len(self.rows)

    def read(self, first, last):
        query = f"SELECT {self.settings.column} FROM {self.settings.table} WHERE rowid = ?"
        for row in self.rows[first:last]:
            yield self.database.execute(query, (row,)).fetchone()[0]

    def identity(self):
        state = os.stat(self.settings.file)
        return [os.path.abspath(self.settings.file), state.st_size, state.st_mtime_ns]
