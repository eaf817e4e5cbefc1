"""Results of `localllm bench` as rows to plot and to compare, from the current run or from a file.

The file is output of `bench -o json` or `-o jsonl`; llama-bench uses the same names. It is untrusted: every value is
validated here, so that drawing needs no checks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from localllm.base.errors import LocalLLMError
from localllm.base.files.regular import open_regular
from localllm.base.printable import printable

MOST_BYTES = 32 << 20
MOST_ROWS = 10_000
MOST_TEXT = 60
MOST_NAME = 4096
LARGEST = 1e18  # maximum accepted value; larger values are invalid


class RunError(LocalLLMError):
    """The file has no valid results of `localllm bench`."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One test of one model. Values that were not measured are 0."""

    model: str  # architecture, parameter count and format
    file: str  # file name of the model, without its folder
    test: str  # pp512, tg128 @ d4096
    threads: int
    placed: str  # GPU layers and KV cache types that are not the default
    prompt: int  # tokens
    answer: int
    depth: int
    rate: float  # tokens/s
    spread: float
    text: str = ""  # name of the text in a speculation test
    operations: float = 0.0  # number of operations in one run
    bytes: float = 0.0  # bytes read in one run
    seconds: float = 0.0  # mean duration of one run
    roof: float = 0.0  # bandwidth in GB/s, measured around the test
    machine_gb: float = 0.0  # GB/s
    machine_gop: float = 0.0  # GOP/s

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for two rows of the same test."""
        return self.file, self.test, self.threads, self.placed

    @property
    def intensity(self) -> float:
        """Return operations per byte, or 0 if unknown."""
        return self.operations / self.bytes if self.bytes else 0.0

    @property
    def gop(self) -> float:
        """Return billions of operations per second, or 0 if unknown."""
        return self.operations / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """The rows of one benchmark run. `name` identifies it in a picture."""

    name: str
    rows: tuple[ResultRow, ...]
    processor: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A test that occurs in both runs."""

    new: ResultRow
    old: ResultRow

    @property
    def ratio(self) -> float:
        return self.new.rate / self.old.rate

    @property
    def apart(self) -> bool:
        """Return whether the speeds differ by more than both spreads."""
        return abs(self.new.rate - self.old.rate) > self.new.spread + self.old.spread


def run_of(name: str, results: Iterable[Mapping[str, Any]]) -> Run:
    """Convert results to rows. Raise RunError if a result is invalid."""
    rows, processor = [], ""
    for number, result in enumerate(results, 1):
        try:
            rows.append(_row(result))
            processor = processor or _text(result, "cpu_info", "")
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"result {number}: {_said(error)}") from None
    return Run(name, tuple(rows), processor)


def read_run(path: Path) -> Run:
    """Read the results in a file. Raise RunError with a one-line message if the file has no results."""
    try:
        with open_regular(path) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from None
    problem = f"{path}: not results of localllm bench -o json or jsonl"
    if len(data) > MOST_BYTES:
        raise RunError(f"{problem}: more than {MOST_BYTES >> 20} MiB")
    try:
        run = run_of(printable(path.name, MOST_TEXT), _values(data))
    except (RunError, ValueError, RecursionError) as error:
        reason = "not JSON" if isinstance(error, ValueError | RecursionError) else str(error)
        raise RunError(f"{problem}: {reason}") from None
    if not run.rows:
        raise RunError(f"{problem}: it contains no results")
    return run


def matched(new: Run, old: Run) -> list[Ratio]:
    """Return the tests that occur in both runs, in the order of the new run. If a test occurs twice, the last result
    counts."""
    known = {row.key: row for row in old.rows}
    return [Ratio(row, known[row.key]) for row in {row.key: row for row in new.rows}.values() if row.key in known]


def _values(data: bytes) -> list[Mapping[str, Any]]:
    """Return the objects of a JSON list or of JSON lines. Raise RunError or ValueError if the data is neither."""
    text = data.decode("utf-8")
    try:
        found = json.loads(text)
        values = found if isinstance(found, list) else [found]
    except ValueError:
        values = [json.loads(line) for line in text.split("\n") if line.strip()]
    if len(values) > MOST_ROWS:
        raise RunError(f"more than {MOST_ROWS} results")
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise RunError(f"result {number} is not an object")
    return values


def _row(result: Mapping[str, Any]) -> ResultRow:
    prompt, answer, depth = (_count(result, name) for name in ("n_prompt", "n_gen", "n_depth"))
    rate = _number(result, "avg_ts")
    if rate <= 0 or not prompt + answer:
        raise ValueError("it measures nothing (avg_ts, or n_prompt and n_gen, are 0)")
    usual = _usual_name(prompt, answer, depth)
    test = _text(result, "test", usual)
    named = PurePath(_text(result, "model_filename", None, MOST_NAME).replace("\\", "/")).name
    return ResultRow(
        model=_text(result, "model_type", _short(named)),
        file=named,
        test=test,
        threads=_count(result, "n_threads"),
        placed=_placed(result),
        prompt=prompt,
        answer=answer,
        depth=depth,
        rate=rate,
        spread=_number(result, "stddev_ts", 0.0),
        text="" if test == usual else test,
        operations=_number(result, "run_operations", 0.0),
        bytes=_number(result, "run_bytes", 0.0),
        seconds=_number(result, "avg_ns", 0.0) / 1e9,
        roof=_number(result, "roof_gb_per_s", 0.0),
        machine_gb=_number(result, "machine_gb_per_s", 0.0),
        machine_gop=_number(result, "machine_gop_per_s", 0.0),
    )


def _usual_name(prompt: int, answer: int, depth: int) -> str:
    parts = (f"pp{prompt}" if prompt else "", f"tg{answer}" if answer else "")
    return "+".join(part for part in parts if part) + (f" @ d{depth}" if depth else "")


def _placed(result: Mapping[str, Any]) -> str:
    """Return the GPU layers and KV cache types that are not the default."""
    layers = result.get("n_gpu_layers", "auto")
    keys, values = (_text(result, name, "f16") for name in ("type_k", "type_v"))
    parts = [] if layers in ("auto", -1) else [f"ngl {_short(layers)}"]
    return ", ".join(parts + ([] if (keys, values) == ("f16", "f16") else [f"cache {keys} {values}"]))


def _text(result: Mapping[str, Any], name: str, default: str | None, most: int = MOST_TEXT) -> str:
    """Return a text as one line. Raise ValueError if it is missing and has no default."""
    value = result.get(name, default)
    if not isinstance(value, str) or (not value and default is None):
        raise ValueError(f"{name} is not a text")
    return printable(value, most)


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, int) and abs(value) < LARGEST else value
    return printable(text if isinstance(text, str) else "?", MOST_TEXT)


def _number(result: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = result.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    if not (0 <= value <= LARGEST and math.isfinite(value)):
        raise ValueError(f"{name} is not a number from 0 to {LARGEST:g}")
    return float(value)


def _count(result: Mapping[str, Any], name: str) -> int:
    value = _number(result, name)
    if value != int(value):
        raise ValueError(f"{name} is not a whole number")
    return int(value)


def _said(error: Exception) -> str:
    return printable(str(error), 120)
