"""Machine-readable results of `localllm bench`: JSON, JSON lines, CSV or SQL. A result is any dataclass."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, fields
from typing import Any

from localllm.base.printable import printable

Show = Callable[[Any], None]
TABLE = "localllm_bench"
_SQL_TYPES = {"int": "INTEGER", "float": "REAL", "str": "TEXT"}


@contextmanager
def _json(kind: type) -> Iterator[Show]:
    results: list[Any] = []
    yield results.append
    print(json.dumps([asdict(result) for result in results], indent=2))


@contextmanager
def _json_lines(kind: type) -> Iterator[Show]:
    yield lambda result: print(json.dumps(asdict(result)), flush=True)


@contextmanager
def _csv(kind: type) -> Iterator[Show]:
    writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
    names = _columns(kind)
    writer.writerow(names)

    def show(result: Any) -> None:
        values = [getattr(result, name) for name in names]
        writer.writerow([printable(value, None) if isinstance(value, str) else value for value in values])
        sys.stdout.flush()

    yield show


@contextmanager
def _sql(kind: type) -> Iterator[Show]:
    """Print statements that create and fill a table, as llama-bench does; `sqlite3 FILE` reads them."""
    names = _columns(kind)
    columns = ",\n".join(f"  {name} {sql_type}" for name, sql_type in names.items())
    print(f"CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n", flush=True)

    def show(result: Any) -> None:
        values = ", ".join(_literal(getattr(result, name)) for name in names)
        print(f"INSERT INTO {TABLE} ({', '.join(names)}) VALUES ({values});", flush=True)

    yield show


def _columns(kind: type) -> dict[str, str]:
    """Return the scalar fields and their types in SQL."""
    return {field.name: _SQL_TYPES[str(field.type)] for field in fields(kind) if str(field.type) in _SQL_TYPES}


def _literal(value: str | int | float) -> str:
    if isinstance(value, str):
        return "'" + printable(value, None).replace("'", "''") + "'"
    return repr(value)


OUTPUTS: dict[str, Callable[[type], AbstractContextManager[Show]]] = {
    "json": _json, "jsonl": _json_lines, "csv": _csv, "sql": _sql,
}  # fmt: skip
