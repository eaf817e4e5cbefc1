"""`localllm bench --against PROGRAM`: alternate localllm and llama-bench on the same file, and report the ratio of
their speeds.

Each run is a separate process that opens the file, warms up and measures once. localllm and llama-bench take turns. The
speed of a machine changes within minutes, so only adjacent runs can be compared. A ratio is the median over the rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, ClassVar

from localllm.base.errors import LocalLLMError
from localllm.base.machine.processor import threads_for
from localllm.cli.app import UsageError
from localllm.cli.commands.bench_output import OUTPUTS, Show
from localllm.cli.commands.bench_tests import Test
from localllm.cli.flags import flag_of
from localllm.cli.terminal.console import room, say
from localllm.cli.terminal.formatting import text_table
from localllm.cli.tool_options import BenchOptions
from localllm.loading.resolve import resolve
from localllm.options import LoadOptions

_ROOT = Path(__file__).resolve().parents[3]
_OURS = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from localllm.cli.main import main; sys.exit(main())"
_PLAIN = ("f16", "f32", "bf16")  # KV cache types that llama.cpp can read without flash attention


@dataclass(frozen=True, slots=True)
class Compared:
    """One test of one model: the speeds of localllm and llama-bench in tokens/s."""

    model_filename: str
    model_type: str
    cpu_info: str
    n_threads: int
    n_gpu_layers: str
    type_k: str
    type_v: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test: str
    rounds: int
    avg_ts: float
    peer: str  # the program and its build
    peer_avg_ts: float
    ratio: float  # localllm / llama-bench, the median over the rounds
    ratio_min: float
    ratio_max: float
    samples_ts: tuple[float, ...]
    peer_samples_ts: tuple[float, ...]


def against(own: BenchOptions, names: Sequence[str], tests: Sequence[Test]) -> None:
    """Run all tests of all models alternately with llama-bench, and print the ratios."""
    if own.speculates:
        raise UsageError(f"--against compares plain decoding; leave out {flag_of('model_draft')} and --spec")
    program = find_program(own.against)
    printer: AbstractContextManager[Show] = _Markdown() if own.output == "md" else OUTPUTS[own.output](Compared)
    with printer as show:
        for name, load, threads, test in product(names, own.loads, own.threads, tests):
            one = replace(own, load=load)
            show(_compare(one, resolve(name), threads_for(threads or None), test, program))


def find_program(name: str) -> str:
    """Return the path to a program, given by its path or by its name on the PATH; raise LocalLLMError if not found."""
    found = shutil.which(os.path.expanduser(name))
    if found is None:
        where = "cannot be run" if os.path.exists(name) else "not found on the PATH"
        raise LocalLLMError(f"{name}: {where}; build llama.cpp's llama-bench and give its path: --against PATH")
    return found


class _Markdown:
    """Collects results and prints the table at the end, because the column widths depend on all results.

    A column is left out if all of its values are the default.
    """

    USUAL: ClassVar = {"ngl": "auto", "type_k": "f16", "type_v": "f16"}
    HEADER = ("model", "threads", *USUAL, "test", "localllm t/s", "peer t/s", "ratio", "of rounds", "peer")

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []

    def __enter__(self) -> Show:
        return self._add

    def _add(self, r: Compared) -> None:
        spread = f"{r.ratio_min:.2f} to {r.ratio_max:.2f}"
        rates = f"{r.avg_ts:.2f}", f"{r.peer_avg_ts:.2f}", f"{r.ratio:.2f}", spread
        placed = r.n_gpu_layers, r.type_k, r.type_v
        self._rows.append((r.model_type, str(r.n_threads), *placed, r.test, *rates, r.peer))

    def __exit__(self, *error: object) -> None:
        if self._rows:  # after Ctrl-C, the table has the results so far
            told = [i for i, name in enumerate(self.HEADER) if {row[i] for row in self._rows} != {self.USUAL.get(name)}]
            header, *rows = (tuple(row[i] for i in told) for row in (self.HEADER, *self._rows))
            print(text_table(header, rows, header[1:-1], room()), flush=True)


def _compare(own: BenchOptions, path: Path, threads: int, test: Test, program: str) -> Compared:
    """Alternate runs of localllm and llama-bench, `repetitions` times each."""
    words = [*_words(own, path, threads, test), *(["--no-warmup"] if own.no_warmup else [])]
    ours, theirs = [], []
    for number in range(own.repetitions):
        ours.append(_run([sys.executable, "-c", _OURS, "bench", *words, *_changed(own)], "localllm"))
        theirs.append(_run([program, *words, *_peer_words(own, ours[-1])], own.against))
        if own.verbose or sys.stderr.isatty():
            pace = f"{ours[-1]['avg_ts']:.2f} : {theirs[-1]['avg_ts']:.2f} tokens/s"
            say(f"{path.name} {test.name}: round {number + 1} of {own.repetitions}, {pace}")
    rates, peers = ([float(run["avg_ts"]) for run in runs] for runs in (ours, theirs))
    ratios = [a / b for a, b in zip(rates, peers, strict=True)]
    keys, values = own.load.cache_types
    build = theirs[0].get("build_commit") or "unknown"
    return Compared(
        model_filename=str(path),
        model_type=ours[0]["model_type"],
        cpu_info=ours[0]["cpu_info"],
        n_threads=threads,
        n_gpu_layers=str(own.load.gpu_layers),
        type_k=keys,
        type_v=values,
        n_prompt=test.prompt,
        n_gen=test.answer,
        n_depth=test.depth,
        test=test.name,
        rounds=own.repetitions,
        avg_ts=mean(rates),
        peer=f"{Path(program).name} {build}",
        peer_avg_ts=mean(peers),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        samples_ts=tuple(rates),
        peer_samples_ts=tuple(peers),
    )


def _words(own: BenchOptions, path: Path, threads: int, test: Test) -> list[str]:
    """Return the options that both programs parse in the same way."""
    both = test.prompt and test.answer
    counts = ["-p", "0", "-n", "0", "-pg", f"{test.prompt},{test.answer}"] if both else []
    counts = counts or ["-p", str(test.prompt), "-n", str(test.answer)]
    depth = ["-d", str(test.depth)] if test.depth else []
    keys, values = own.load.cache_types
    types = ["-ctk", keys, "-ctv", values] if (keys, values) != ("f16", "f16") else []
    return ["-m", str(path), "-t", str(threads), *counts, *depth, *types, "-r", "1", "-o", "json"]


def _changed(own: BenchOptions) -> list[str]:
    """Return the placement options that differ from the defaults, for localllm's command line."""
    usual, words = LoadOptions().values(), list[str]()
    for name in ("backend", "gpu_layers", "n_cpu_moe", "device"):
        value = own.load.values()[name]
        words += [flag_of(name), str(value)] if value != usual[name] else []
    return [*words, *(["--force"] if own.force else [])]


def _peer_words(own: BenchOptions, ours: dict[str, Any]) -> list[str]:
    """Return the options that make llama-bench use the same devices as localllm."""
    layers = own.load.gpu_layers
    on_card = [] if layers == "auto" else ["-ngl", "999" if layers == "all" else str(layers)]
    words = ["-ngl", "0"] if ours["backends"] == "CPU" else on_card
    words += ["-ncmoe", str(own.load.n_cpu_moe)] if own.load.n_cpu_moe else []
    return [*words, *(["-fa", "1"] if own.load.cache_types[1] not in _PLAIN else [])]


def _run(command: Sequence[str], name: str) -> dict[str, Any]:
    """Run one test and return the result. Raise LocalLLMError with the program's output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise LocalLLMError(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no message"])[-1].removeprefix("error: ")
        raise LocalLLMError(f"{name} ended with code {done.returncode}: {last}")
    try:
        (result,) = json.loads(done.stdout)
        if float(result["avg_ts"]) > 0:
            return dict(result)
    except (ValueError, TypeError, KeyError):
        pass
    raise LocalLLMError(f"{name} did not print results like those from llama-bench -o json; is it llama-bench?")
