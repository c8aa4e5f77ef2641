"""The two databases that a store can be in. Both take the same SQL, with parameters such as :id."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Any, Protocol

#: how long a statement waits for other processes, s
_BUSY_SECONDS = 20.0
_TABLES = """
CREATE TABLE IF NOT EXISTS allspark_objects (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, tenant TEXT NOT NULL, created REAL NOT NULL, touched REAL NOT NULL,
  state TEXT NOT NULL, size INTEGER NOT NULL, data TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS allspark_objects_of ON allspark_objects (kind, tenant, created, id);
CREATE INDEX IF NOT EXISTS allspark_objects_in ON allspark_objects (kind, state, touched);
CREATE TABLE IF NOT EXISTS allspark_chunks (
  id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (id, number));
"""

Row = tuple[Any, ...]


class Execute(Protocol):
    """Runs a statement of a transaction; returns the rows, and how many rows it changed."""

    def __call__(self, sql: str, /, **values: Any) -> tuple[list[Row], int]:
        """See the class."""


class Database(Protocol):
    """A database, for one thread. `errors`: what it raises if it fails."""

    errors: tuple[type[Exception], ...]

    def transaction(self) -> contextlib.AbstractContextManager[Execute]:
        """A transaction, which ends with the with block."""

    def close(self) -> None:
        """Close the connections."""


def open_database(where: str) -> Database:
    """The database at a URL of SQLAlchemy, or in a file of SQLite. Raises ValueError or OSError."""
    return _SqlAlchemy(where) if "://" in where else _Sqlite(where)


class _Sqlite:
    errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: str):
        # Nobody else may read what clients have asked, nor the log beside the file, which gets the file's mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None,
                                               check_same_thread=False)
            # Readers do not wait for a writer, and a power failure loses at most the last transactions.
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(_TABLES)
        except sqlite3.Error as error:
            raise ValueError(f"--store {path!r} is not a database that SQLite can use: {error}") from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Execute]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._execute
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _execute(self, sql: str, /, **values: Any) -> tuple[list[Row], int]:
        cursor = self._connection.execute(sql, values)
        return cursor.fetchall(), cursor.rowcount

    def close(self) -> None:
        self._connection.close()


class _SqlAlchemy:
    def __init__(self, url: str):
        try:
            import sqlalchemy
        except ImportError:
            raise ValueError(f"--store {_shown(url)!r} needs SQLAlchemy: pip install 'allspark-numa[store]'") from None
        self._text = sqlalchemy.text
        self.errors: tuple[type[Exception], ...] = (sqlalchemy.exc.SQLAlchemyError,)
        name, number = sqlalchemy.String(200), sqlalchemy.Double
        column, data = sqlalchemy.Column, sqlalchemy.LargeBinary(2**32 - 1)
        text = sqlalchemy.Text(2**32 - 1)
        tables = sqlalchemy.MetaData()
        objects = sqlalchemy.Table(
            "allspark_objects", tables, column("id", name, primary_key=True), column("kind", name, nullable=False),
            column("tenant", name, nullable=False), column("created", number, nullable=False),
            column("touched", number, nullable=False), column("state", name, nullable=False),
            column("size", sqlalchemy.BigInteger, nullable=False), column("data", text, nullable=False))
        sqlalchemy.Index("allspark_objects_of", objects.c.kind, objects.c.tenant, objects.c.created, objects.c.id)
        sqlalchemy.Index("allspark_objects_in", objects.c.kind, objects.c.state, objects.c.touched)
        sqlalchemy.Table("allspark_chunks", tables, column("id", name, primary_key=True),
                         column("number", sqlalchemy.BigInteger, primary_key=True, autoincrement=False),
                         column("data", data, nullable=False))
        try:
            self._engine = sqlalchemy.create_engine(url, pool_pre_ping=True, pool_size=1)
            with contextlib.suppress(sqlalchemy.exc.ProgrammingError, sqlalchemy.exc.OperationalError):
                tables.create_all(self._engine)     # fails if another process does it at the same time
            with self._engine.connect() as connection:
                connection.execute(self._text("SELECT COUNT(*) FROM allspark_objects WHERE id = ''"))
        except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
            raise ValueError(f"--store {_shown(url)!r} cannot be used: {error}") from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Execute]:
        with self._engine.begin() as connection:
            def execute(sql: str, /, **values: Any) -> tuple[list[Row], int]:
                result = connection.execute(self._text(sql), values)
                return [tuple(row) for row in result] if result.returns_rows else [], result.rowcount

            yield execute

    def close(self) -> None:
        self._engine.dispose()


def _shown(url: str) -> str:
    """A URL without its password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
