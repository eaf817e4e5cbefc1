"""`localllm bench`: tokens a second as llama-bench measures them (its tests, names and columns), and how near they come
to the roof: bytes read against the bandwidth measured around each test; operations a second for prompts.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from statistics import mean, stdev
from time import perf_counter_ns

import numpy as np

from backends.cpu.backend import default_threads
from localllm import __version__, load
from localllm.cli.answer import read_bandwidth, tell
from localllm.cli.console import LoadProgress
from localllm.cli.options import Bench
from localllm.cli.text import markdown_row, parameters, size
from localllm.errors import LocalLLMError
from localllm.model import Model
from localllm.session import Session
from models import Summary, architecture_of, summarize


@dataclass(frozen=True, slots=True)
class Test:
    """One row: a prompt of `prompt` tokens or the decoding of `answer` tokens, after `depth` tokens."""

    prompt: int
    answer: int
    depth: int

    @property
    def name(self) -> str:
        depth = f" @ d{self.depth}" if self.depth else ""
        return (f"pp{self.prompt}" if self.prompt else f"tg{self.answer}") + depth

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class Result:
    """What one test gave; field names as in llama-bench where it has them."""

    build_commit: str
    cpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_threads: int
    type_k: str
    type_v: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test: str
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    bytes_per_token: int  # that decoding reads, on the average of the test; 0 for prompts
    gb_per_s: float
    roof_gb_per_s: float
    roof_share: float
    gop_per_s: float  # of prompts
    samples_ns: tuple[int, ...]


def bench(own: Bench, name: str) -> None:
    """Run every test and print each result as soon as it is there."""
    tests = [Test(p, 0, d) for d in own.depths for p in own.prompts if p]
    tests += [Test(0, n, d) for d in own.depths for n in own.answers if n]
    if not tests:
        raise LocalLLMError("nothing to measure: give -p or -n more than 0")
    tests.sort(key=lambda test: test.depth)
    with _PRINTERS[own.output]() as show:
        for threads in own.threads:
            with LoadProgress() as progress:
                model = load(
                    name, own.backend, threads, max(t.depth + t.tokens for t in tests), own.cache_type_k,
                    own.cache_type_v, progress, force=True, layers=own.gpu_layers, host_experts=own.cpu_moe,
                    device=own.device,
                )  # fmt: skip
            with model:
                tell(model)
                for test in tests:
                    show(
                        _measure(model, test, threads or default_threads(), own.repetitions, warm_up=not own.no_warmup)
                    )


def _measure(model: Model, test: Test, threads: int, repetitions: int, warm_up: bool) -> Result:
    """Time `test`: the cache is filled to its depth, then it runs again and again from there."""
    config = model.config
    assert config is not None
    summary = summarize(config, architecture_of(model.file.metadata), model.file.tensors)
    tokens = np.random.RandomState(0).randint(0, config.vocabulary, test.depth + test.tokens).tolist()
    session = model.session()
    try:
        _evaluate(model, session, tokens[: test.depth])
        before = read_bandwidth(model) if test.answer else 0.0
        if warm_up:
            _run(model, session, test, tokens if test.prompt else tokens[: test.depth + 1])
        samples = [_run(model, session, test, tokens) for _ in range(repetitions)]
        roof = max(before, read_bandwidth(model)) if test.answer else 0.0
    finally:
        session.close()
    rates = [test.tokens / (ns / 1e9) for ns in samples]
    rate = mean(rates)
    memory = model.executable.memory
    middle = test.depth + (test.answer + 1) / 2  # tokens that attention sees, on the average
    read = round(memory.read_after(middle)) if test.answer else 0
    return Result(
        build_commit=f"localllm {__version__}",
        cpu_info=model.device,
        backends=model.device.split(":")[0].upper(),
        model_filename=str(model.file.path),
        model_type=_model_type(model, summary),
        model_size=sum(tensor.nbytes for tensor in model.file.tensors.values()),
        model_n_params=summary.parameters,
        n_batch=model.batch_rows,
        n_threads=threads,
        type_k=model.cache.types.keys,
        type_v=model.cache.types.values,
        n_prompt=test.prompt,
        n_gen=test.answer,
        n_depth=test.depth,
        test=test.name,
        test_time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        avg_ns=round(mean(samples)),
        stddev_ns=round(stdev(samples)) if len(samples) > 1 else 0,
        avg_ts=rate,
        stddev_ts=stdev(rates) if len(rates) > 1 else 0.0,
        bytes_per_token=read,
        gb_per_s=rate * read / 1e9,
        roof_gb_per_s=roof / 1e9,
        roof_share=rate * read / roof if roof else 0.0,
        gop_per_s=_operations(summary, config.vocabulary * config.width, test, model.batch_rows) / mean(samples)
        if test.prompt
        else 0.0,
        samples_ns=tuple(samples),
    )


def _run(model: Model, session: Session, test: Test, tokens: list[int]) -> int:
    """Nanoseconds of one run over `tokens` past the depth."""
    rest = tokens[test.depth :]
    _evaluate(model, session, tokens[session.rewind(test.depth) : test.depth])  # what windows have given up
    start = perf_counter_ns()
    if test.prompt:
        _evaluate(model, session, rest)
    else:
        for token in rest:
            session.evaluate((token,), logits=False)
    return perf_counter_ns() - start


def _evaluate(model: Model, session: Session, tokens: list[int]) -> None:
    for start in range(0, len(tokens), model.batch_rows):
        session.evaluate(tokens[start : start + model.batch_rows], logits=False)


def _operations(summary: Summary, output_weights: int, test: Test, batch: int) -> int:
    """Additions and multiplications of a prompt: matrices for every token but the output's, that once for a
    batch, and attention over all that came before."""
    positions = test.prompt * test.depth + test.prompt * (test.prompt + 1) // 2
    every = summary.flops_per_token - 2 * output_weights
    return (
        test.prompt * every
        + -(-test.prompt // batch) * 2 * output_weights
        + positions * summary.attention_flops_per_position
    )


def _model_type(model: Model, summary: Summary) -> str:
    """Architecture, size and main format, as "llama 1.24 B Q4_0"."""
    held: dict[str, int] = {}
    for tensor in model.file.tensors.values():
        held[tensor.format] = held.get(tensor.format, 0) + tensor.nbytes
    name = model.config.architecture if model.config is not None else "?"
    return f"{name} {parameters(summary.parameters)} {max(held, key=lambda f: held[f])}"


# -- output --------------------------------------------------------------------------------------------------------

Show = Callable[[Result], None]

_COLUMNS: dict[str, int] = {  # of the Markdown table, with their widths; llama-bench's but for the last four
    "model": 26,
    "size": 10,
    "params": 8,
    "backend": 7,
    "threads": 7,
    "test": 14,
    "t/s": 20,
    "GB/s": 7,
    "roof GB/s": 9,
    "% of roof": 9,
    "GOP/s": 8,
}
_RIGHT = tuple(name for name in _COLUMNS if name not in ("model", "backend"))


def _cells(r: Result) -> tuple[str, ...]:
    decoding = (f"{r.gb_per_s:.2f}", f"{r.roof_gb_per_s:.2f}", f"{100 * r.roof_share:.0f}") if r.n_gen else ("", "", "")
    return (
        r.model_type,
        size(r.model_size),
        parameters(r.model_n_params),
        r.backends,
        str(r.n_threads),
        r.test,
        f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}",
        *decoding,
        f"{r.gop_per_s:.1f}" if r.n_prompt else "",
    )


@contextmanager
def _markdown() -> Iterator[Show]:
    names, widths = tuple(_COLUMNS), tuple(_COLUMNS.values())
    rule = tuple("-" * (w - 1) + ":" if name in _RIGHT else "-" * w for name, w in _COLUMNS.items())
    for row in (names, rule):
        print(markdown_row(names, row, widths, _RIGHT), flush=True)
    yield lambda result: print(markdown_row(names, _cells(result), widths, _RIGHT), flush=True)


@contextmanager
def _json() -> Iterator[Show]:
    results: list[Result] = []
    yield results.append
    print(json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False))


@contextmanager
def _csv() -> Iterator[Show]:
    writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
    names = [field.name for field in fields(Result) if field.name != "samples_ns"]
    writer.writerow(names)

    def show(result: Result) -> None:
        writer.writerow([getattr(result, name) for name in names])
        sys.stdout.flush()

    yield show


_PRINTERS = {"md": _markdown, "json": _json, "csv": _csv}
