"""Worlds: the database of an episode, copied from a template in microseconds and compared row by row.

    template = template_for(task, domain)      # once per task: tables, rows, and the rows after the expected calls
    world = lend_world(template)               # from the process's pool, restored by SQLite's backup
    rows_of(world.raw, domain.metadata) == template.expected
    return_world(world)

A world is an in-memory SQLite database behind one SQLAlchemy connection that lives as long as the process. All worlds
share one engine, so a statement is compiled once per process, not once per episode.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, MetaData, Table
from sqlalchemy.pool import NullPool

from tbx_envs.domains import Domain
from tbx_envs.errors import DomainError, ToolFault, did_you_mean
from tbx_envs.task import Task
from tbx_envs.tools.calls import answer_call
from tbx_envs.tools.tool import Tool

# Table name -> its rows, each a tuple of the stable columns' values as SQLite holds them, in a canonical
# order.
Rows = Mapping[str, list[tuple[Any, ...]]]

_MAX_TEMPLATES = 1024  # about 0.3 MB each; enough for a training pool
_MAX_IDLE_WORLDS = 64


class World:
    """One in-memory database: a raw connection for copying and comparing, a SQLAlchemy one for tools."""

    def __init__(self) -> None:
        self.db: Connection = _engine(os.getpid()).connect()
        raw = self.db.connection.dbapi_connection
        assert isinstance(raw, sqlite3.Connection)
        self.raw: sqlite3.Connection = raw
        self.db.rollback()
        # Frees the memory of a world that is dropped.
        self._finalizer: weakref.finalize[..., World] = weakref.finalize(self, self.db.close)

    def restore(self, source: sqlite3.Connection) -> None:
        """Replace the content by a copy of `source`."""
        self.db.rollback()
        source.backup(self.raw)

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        self._finalizer()


@functools.lru_cache(maxsize=2)
def _engine(pid: int) -> Engine:
    """One engine per process. `pid` is in the cache's key since SQLite connections must not cross a fork.

    NullPool and a creator: each `connect` opens a database of its own, which its World keeps open.
    """
    return sqlalchemy.create_engine("sqlite://", poolclass=NullPool, creator=_open_database)


def _open_database() -> sqlite3.Connection:
    raw = sqlite3.connect(":memory:", check_same_thread=False)
    raw.execute("PRAGMA foreign_keys = ON")
    return raw


# --- a pool of worlds per process ---------------------------------------------------------------------------

_idle_worlds: dict[int, list[World]] = {}


def lend_world(template: WorldTemplate) -> World:
    """A fresh copy of the template's initial world, in a database of this process's pool."""
    return _lend(template.database)


def _lend(source: sqlite3.Connection) -> World:
    idle = _idle_worlds.setdefault(os.getpid(), [])
    while True:
        try:
            world = idle.pop()
        except IndexError:
            world = World()
            world.restore(source)
            return world
        try:
            world.restore(source)
            return world
        except sqlite3.OperationalError:  # a tool left a result open, so the database cannot be overwritten
            world.close()


def return_world(world: World) -> None:
    """Put a world back into the pool. One that a fault left in an unknown state must be closed instead."""
    idle = _idle_worlds.setdefault(os.getpid(), [])
    if len(idle) < _MAX_IDLE_WORLDS:
        idle.append(world)
    else:
        world.close()


# --- templates ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class WorldTemplate:
    """What all episodes of a task share.

    Attributes:
        task: task.
        domain: domain of the task.
        database: initial world, never changed.
        initial: rows of the initial world.
        expected: rows after the task's expected calls.
    """

    task: Task
    domain: Domain
    database: sqlite3.Connection
    initial: Rows
    expected: Rows


_templates: collections.OrderedDict[tuple[int, str], WorldTemplate] = collections.OrderedDict()


def template_for(task: Task, domain: Domain) -> WorldTemplate:
    """The task's template, made on first use and kept for the most recent `_MAX_TEMPLATES` tasks.

    Raises:
        DomainError: the world does not fit the tables, or an expected call is rejected or fails.
    """
    key = (os.getpid(), task.uid)
    template = _templates.pop(key, None)
    if template is None or template.domain is not domain or template.task != task:
        template = build_template(task, domain)
    _templates[key] = template  # now the most recent
    while len(_templates) > _MAX_TEMPLATES:
        _templates.popitem(last=False)
    return template


def build_template(task: Task, domain: Domain) -> WorldTemplate:
    """A new template of the task: create tables, insert rows, replay the expected calls.

    Raises:
        DomainError: the world does not fit the tables, or an expected call is rejected or fails.
    """
    world = _lend(_empty_database(os.getpid(), domain.metadata))
    database = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        world.raw.execute("PRAGMA foreign_keys = OFF")  # rows come in any order; all are checked at the end
        for table_name, rows in task.world.items():
            _insert(world.db, task.uid, _table(task.uid, domain.metadata, table_name), rows)
        dangling = world.raw.execute("PRAGMA foreign_key_check").fetchall()
        if dangling:
            table_name, rowid, target, _ = dangling[0]
            raise DomainError(
                f"task {task.uid}: row {rowid} of '{table_name}' refers to a row of '{target}' that the "
                f"world lacks ({len(dangling)} such rows). Fix the task's world."
            )
        world.raw.execute("PRAGMA foreign_keys = ON")
        world.raw.backup(database)
        initial = rows_of(world.raw, domain.metadata)
        replay(world, task, domain)
        expected = rows_of(world.raw, domain.metadata)
    except BaseException:
        database.close()
        world.close()
        raise
    return_world(world)
    template = WorldTemplate(task, domain, database, initial, expected)
    weakref.finalize(template, database.close)
    return template


@functools.lru_cache(maxsize=16)
def _empty_database(pid: int, metadata: MetaData) -> sqlite3.Connection:
    """The tables without rows, made once per process: creating them takes most of a template's time."""
    world = World()
    metadata.create_all(world.db)
    world.db.commit()
    empty = sqlite3.connect(":memory:", check_same_thread=False)
    world.raw.backup(empty)
    world.close()
    weakref.finalize(metadata, empty.close)
    return empty


def replay(world: World, task: Task, domain: Domain) -> None:
    """Run the task's expected calls on `world`.

    Raises:
        DomainError: a call was rejected, was invalid, or raised.
    """
    tools = domain_tools(domain)
    for number, call in enumerate(task.expected_calls, start=1):
        of = f"{number} of {len(task.expected_calls)}"
        where = f"task {task.uid}: expected call {of}, {call.tool}({dict(call.arguments)})"
        try:
            answer = answer_call(tools, world.db, domain.clock, call.tool, call.arguments)
        except ToolFault as fault:
            raise DomainError(f"{where}, failed: {fault}") from fault
        if answer.status != "ok":
            raise DomainError(f"{where}, was answered '{answer.status}': {answer.text} Fix the task or the tool.")


def domain_tools(domain: Domain) -> dict[str, Tool]:
    """Name -> tool, in canonical order."""
    return {tool.name: tool for tool in domain.tools}


def _table(uid: str, metadata: MetaData, name: str) -> Table:
    if name not in metadata.tables:
        raise DomainError(
            f"task {uid}: its world has a table '{name}', which the domain lacks."
            f"{did_you_mean(name, metadata.tables)} Tables: {', '.join(metadata.tables)}."
        )
    return metadata.tables[name]


def _insert(db: Connection, uid: str, table: Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert JSON rows, converting ISO text to dates and times; each row may leave out different columns."""
    makers = {column.name: maker for column in table.columns if (maker := _maker(column)) is not None}
    for names, batch in itertools.groupby(rows, key=lambda row: tuple(sorted(row))):
        unknown = set(names) - set(table.columns.keys())
        if unknown:
            name = min(unknown)
            raise DomainError(
                f"task {uid}: a row of '{table.name}' has a column '{name}', which the table lacks."
                f"{did_you_mean(name, table.columns.keys())} Columns: {', '.join(table.columns.keys())}."
            )
        typed = [
            {
                name: makers[name](value) if name in makers and isinstance(value, str) else value
                for name, value in row.items()
            }
            for row in batch
        ]
        try:
            db.execute(table.insert(), typed)
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise DomainError(f"task {uid}: the rows of '{table.name}' do not fit the table: {error}") from error
    db.commit()


def _maker(column: sqlalchemy.Column[Any]) -> Any:
    try:
        python_type = column.type.python_type
    except NotImplementedError:
        return None
    return python_type.fromisoformat if python_type in _ISO_TYPES else None


_ISO_TYPES = (datetime.date, datetime.datetime, datetime.time)


# --- rows ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """How the rows of a table are read and described.

    Attributes:
        name: name of the table.
        columns: stable columns, primary key first.
        key_width: number of columns of the primary key; 0 when a part of it is unstable.
        query: statement that reads the rows in canonical order.
    """

    name: str
    columns: tuple[str, ...]
    key_width: int
    query: str


@functools.lru_cache(maxsize=64)
def _layouts(metadata: MetaData) -> tuple[_Layout, ...]:
    return tuple(_layout(metadata.tables[name]) for name in sorted(metadata.tables))


def _layout(table: Table) -> _Layout:
    stable = [column.name for column in table.columns if not column.info.get("unstable")]
    key = [column.name for column in table.primary_key.columns]
    keyed = bool(key) and set(key) <= set(stable)
    columns = [*key, *(name for name in stable if name not in key)] if keyed else stable
    quoted = ", ".join(f'"{name}"' for name in columns)
    order = ", ".join(f'"{name}"' for name in (key if keyed else columns))
    query = f'SELECT {quoted} FROM "{table.name}" ORDER BY {order}' if columns else ""
    return _Layout(table.name, tuple(columns), len(key) if keyed else 0, query)


def rows_of(raw: sqlite3.Connection, metadata: MetaData) -> Rows:
    """All rows in canonical form: stable columns only, ordered by primary key; by all columns if it is not stable."""
    return {layout.name: raw.execute(layout.query).fetchall() for layout in _layouts(metadata) if layout.query}


def digest(rows: Rows) -> str:
    """SHA-256 (hex) of canonical rows; equal exactly when the rows are."""
    text = json.dumps(rows, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=_bytes_to_text)
    return hashlib.sha256(text.encode()).hexdigest()


def _bytes_to_text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"bytes:{value.hex()}"
    raise TypeError(f"a row holds {value!r}, which SQLite cannot have given")


def differences(actual: Rows, expected: Rows, metadata: MetaData) -> tuple[str, ...]:
    """One readable line for each row that is not as expected, tables in order of name; empty when equal.

    visits: V31 status is 'booked', expected 'cancelled'
    visits: V40 is missing (patient_id='P2', status='booked')
    notes: N7 is unexpected (text='call back')
    """
    if actual == expected:
        return ()
    lines: list[str] = []
    for layout in _layouts(metadata):
        have, want = actual.get(layout.name, []), expected.get(layout.name, [])
        if have != want:
            lines += _table_differences(layout, have, want)
    return tuple(lines)


def _table_differences(layout: _Layout, have: list[tuple], want: list[tuple]) -> Iterator[str]:
    width = layout.key_width
    if width == 0:  # no key to identify rows by: equal rows are possible
        surplus, lack = collections.Counter(have), collections.Counter(want)
        yield from (f"{layout.name}: a row is missing ({_fields(layout, row)})" for row in (lack - surplus).elements())
        yield from (
            f"{layout.name}: a row is unexpected ({_fields(layout, row)})" for row in (surplus - lack).elements()
        )
        return
    have_by_key, want_by_key = {row[:width]: row for row in have}, {row[:width]: row for row in want}
    for key in sorted(have_by_key.keys() | want_by_key.keys(), key=repr):
        name = f"{layout.name}: {'/'.join(map(str, key))}"
        if key not in have_by_key:
            yield f"{name} is missing ({_fields(layout, want_by_key[key])})"
        elif key not in want_by_key:
            yield f"{name} is unexpected ({_fields(layout, have_by_key[key])})"
        elif have_by_key[key] != want_by_key[key]:
            changed = [
                f"{column} is {value!r}, expected {wanted!r}"
                for column, value, wanted in zip(layout.columns, have_by_key[key], want_by_key[key], strict=True)
                if value != wanted
            ]
            yield f"{name} {'; '.join(changed)}"


def _fields(layout: _Layout, row: tuple) -> str:
    named = list(zip(layout.columns, row, strict=True))[layout.key_width :]
    return ", ".join(f"{column}={value!r}" for column, value in named)
