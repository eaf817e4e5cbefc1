"""`localllm bench`: tokens/s with llama-bench's tests, names and columns, and the share of the memory bandwidth used.

Decode tests compare the bytes read with the bandwidth measured around each test. Prefill tests report operations per
second. With a drafter, three more tests measure the speedup of speculative decoding, each on one text. Pictures are
measured by `bench_image.py`. `bench_against.py` alternates localllm and llama-bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from statistics import mean, stdev
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from localllm import __version__, load
from localllm.base.errors import LocalLLMError
from localllm.base.machine.energy import Energy, find_energy
from localllm.base.machine.memory import peak_memory, reset_peak
from localllm.base.machine.processor import threads_for
from localllm.cli.commands.bench_output import OUTPUTS, Show
from localllm.cli.commands.bench_picture import Pictured
from localllm.cli.commands.bench_speculation import LONGEST_TEXT, TEXTS
from localllm.cli.commands.bench_speculation import measure_speculation as measure_guessing
from localllm.cli.commands.bench_tests import Test, tests_of
from localllm.cli.commands.bench_work import bytes_per_token, work_of
from localllm.cli.commands.splitting import connected, splitting
from localllm.cli.terminal.answer import MeasuredRoof, read_bandwidth, tell
from localllm.cli.terminal.console import LoadProgress, room, say
from localllm.cli.terminal.formatting import markdown_row, parameters, record, size
from localllm.cli.tool_options import BenchOptions
from localllm.engine.session import Session
from localllm.model import Model
from localllm.plan import Summary, summarize


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of one test. Fields that also exist in llama-bench have the same names."""

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
    bytes_per_token: int  # bytes read from memory per decoded token, averaged over the test; 0 for prefill
    gb_per_s: float
    roof_gb_per_s: float
    roof_share: float
    gop_per_s: float  # prefill only
    samples_ns: tuple[int, ...]
    speculation: str = ""  # the drafter, if the test uses one
    plain_ts: float = 0.0  # tokens/s of the same answers without speculation
    n_drafted: int = 0
    n_accepted: int = 0  # drafted tokens that were accepted
    p50_ns: int = 0  # median inter-token latency; the 90th and 99th percentile follow
    p90_ns: int = 0
    p99_ns: int = 0
    load_ns: int = 0  # time to open the model and to compile kernels that were not cached
    peak_bytes: int = 0  # peak main memory since the model was opened
    joules_per_token: float = 0.0  # energy of processor and memory per token; 0 if not measured
    n_gpu_layers: str = "auto"  # as given on the command line
    run_operations: int = 0  # operations of one run; 0 with speculation
    run_bytes: int = 0  # bytes read from memory in one run (`bench_work`)
    machine_gb_per_s: float = 0.0  # read bandwidth of this machine, measured for --plot
    machine_gop_per_s: float = 0.0  # int8 multiply-adds of this machine, two operations each
    image: str = ""  # width and height of the picture, such as 448x448; means of the runs follow
    n_image: int = 0  # tokens of the picture, which `n_prompt` includes
    preprocess_ns: int = 0
    encode_ns: int = 0
    first_token_ns: int = 0  # from the picture to the first token of the answer
    second_turn_ns: int = 0  # the same for the second turn, whose picture is in the cache


def bench(own: BenchOptions, names: Sequence[str]) -> None:
    """Run every test, and print each result as soon as it is known."""
    tests = tests_of(own)
    if own.against:
        from localllm.cli.commands.bench_against import against

        against(own, names, tests)
        return
    guessed = [Test(0, n, 0, text) for n in own.n_gen if n for text in TEXTS] if own.speculates else []
    context = max(t.depth + t.tokens + LONGEST_TEXT * bool(t.text) for t in (*tests, *guessed))
    if own.image:
        from localllm.cli.commands.bench_image import needed_context

        context = max(context, *[needed_context(name, own.load, own.image) for name in names])
    pictured, energy = Pictured(own, names), find_energy()
    if own.verbose and energy.missing:
        say(f"energy is not measured: {energy.missing}")
    printer = _markdown(_columns(own, energy)) if own.output == "md" else OUTPUTS[own.output](BenchResult)
    with connected(own.machines), printer as show:
        for number, (name, load_options, threads) in enumerate(product(names, own.loads, own.threads)):
            if not reset_peak() and own.verbose and number:
                say("peak memory includes earlier models: this system cannot reset the peak")
            model_threads = threads_for(threads or None)
            options = load_options.changed({"any_cache": True, "force": own.force})
            options = options if own.image else options.changed({"mmproj": "off"})
            began = perf_counter_ns()
            with ExitStack() as stack:
                split = stack.enter_context(splitting(own.machines))
                with LoadProgress() as progress:
                    model = load(name, options, progress=progress, split=split, ctx_size=context, threads=model_threads)
                stack.enter_context(model)
                if model.encodes:
                    problem = "has an encoder, and bench measures models that continue a text"
                    raise LocalLLMError(f"{name}: {problem}; `localllm run --stats` measures an answer")
                loaded = perf_counter_ns() - began
                tell(model)
                meter = energy if model.device.startswith("cpu") else Energy(())
                if own.verbose and energy.counters and not meter.counters:
                    say("energy is not measured: the processor's counters do not include graphics cards")
                for test in (*tests, *guessed):
                    result = _one(model, test, model_threads, own, meter)
                    layers = str(load_options.gpu_layers)
                    result = replace(result, n_gpu_layers=layers, load_ns=loaded, peak_bytes=peak_memory())
                    if model.device.startswith("cpu"):
                        roofs = pictured.speed.read_bytes / 1e9, pictured.speed.byte_operations / 1e9
                        result = replace(result, machine_gb_per_s=roofs[0], machine_gop_per_s=roofs[1])
                    pictured.add(result)
                    show(result)
    pictured.end()


def _one(model: Model, test: Test, threads: int, own: BenchOptions, energy: Energy) -> BenchResult:
    if test.text:
        return _guessed(model, test, threads, own.repetitions, not own.no_warmup)
    if test.image != (0, 0):
        return _seen(model, test, threads, own.repetitions, not own.no_warmup)
    return _measure(model, test, threads, own.repetitions, not own.no_warmup, energy)


def _guessed(model: Model, test: Test, threads: int, repetitions: int, warm_up: bool) -> BenchResult:
    """Time the generation for a text with and without speculation."""
    found = measure_guessing(model, test.text, test.answer, repetitions, warm_up)
    assert model.speculation is not None
    result = _result(model, test, threads, found.guessed_ns, found.gaps_ns)
    return replace(
        result,
        speculation=model.speculation.options.kind,
        plain_ts=mean(test.answer / (ns / 1e9) for ns in found.plain_ns),
        n_drafted=found.drafted,
        n_accepted=found.accepted,
    )


def _seen(model: Model, test: Test, threads: int, repetitions: int, warm_up: bool) -> BenchResult:
    """Time a conversation about a picture."""
    from localllm.cli.commands.bench_image import measure_picture

    runs = measure_picture(model, test.image, repetitions, warm_up)
    test = replace(test, prompt=runs[0].prompt)
    return replace(
        _result(model, test, threads, tuple(run.first for run in runs), ()),
        image=test.name,
        n_image=runs[0].tokens,
        preprocess_ns=round(mean(run.preprocess for run in runs)),
        encode_ns=round(mean(run.encode for run in runs)),
        first_token_ns=round(mean(run.first for run in runs)),
        second_turn_ns=round(mean(run.second for run in runs)),
    )


def _measure(model: Model, test: Test, threads: int, repetitions: int, warm_up: bool, energy: Energy) -> BenchResult:
    """Time `test`: fill the KV cache to its depth once, then repeat the run from there."""
    config = model.config
    assert config is not None
    tokens = np.random.RandomState(0).randint(0, config.vocabulary, test.depth + test.tokens).tolist()
    session = model.session()
    decodes = test.answer and not test.prompt
    try:
        _evaluate(model, session, tokens[: test.depth])
        before = read_bandwidth(model) if decodes else 0.0
        if warm_up:
            _run(model, session, test, tokens if test.prompt else tokens[: test.depth + 1])
        used = energy.read()
        runs = [_run(model, session, test, tokens) for _ in range(repetitions)]
        joules = energy.joules(used, energy.read()) / (repetitions * test.tokens)
        roof = max(before, read_bandwidth(model)) if decodes else 0.0
    finally:
        session.close()
    samples, gaps = tuple(run.ns for run in runs), [gap for run in runs for gap in run.gaps]
    work = work_of(model, test)
    result = replace(
        _result(model, test, threads, samples, gaps),
        joules_per_token=joules,
        run_operations=work.operations,
        run_bytes=work.bytes,
    )
    if test.prompt and test.answer:
        return result
    if test.prompt:
        return replace(result, gop_per_s=work.operations / mean(samples))
    read = bytes_per_token(model, test)
    rate = result.avg_ts * read
    return replace(
        result,
        bytes_per_token=read,
        gb_per_s=rate / 1e9,
        roof_gb_per_s=roof / 1e9,
        roof_share=rate / roof if roof else 0.0,
    )


def _summary(model: Model) -> Summary:
    assert model.plan is not None
    return summarize(model.plan)


def _result(model: Model, test: Test, threads: int, samples: tuple[int, ...], gaps: Sequence[int]) -> BenchResult:
    """Return the fields that all tests share. `gaps` are the nanoseconds between tokens."""
    rates, summary = [test.tokens / (ns / 1e9) for ns in samples], _summary(model)
    late = [round(float(ns)) for ns in np.percentile(gaps, (50, 90, 99))] if gaps else [0, 0, 0]
    return BenchResult(
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
        avg_ts=mean(rates),
        stddev_ts=stdev(rates) if len(rates) > 1 else 0.0,
        bytes_per_token=0,
        gb_per_s=0.0,
        roof_gb_per_s=0.0,
        roof_share=0.0,
        gop_per_s=0.0,
        samples_ns=samples,
        p50_ns=late[0],
        p90_ns=late[1],
        p99_ns=late[2],
    )


class _Run(NamedTuple):
    """The duration of one run, and of each decoded token in it, in nanoseconds."""

    ns: int
    gaps: list[int]


def _run(model: Model, session: Session, test: Test, tokens: list[int]) -> _Run:
    """Time one run over `tokens`, with `test.depth` tokens already in the KV cache."""
    rest, gaps = tokens[test.depth :], []
    # `rewind` may go further back than the depth, because sliding-window layers have dropped older KV entries.
    _evaluate(model, session, tokens[session.rewind(test.depth) : test.depth])
    start = last = perf_counter_ns()
    if test.prompt:
        _evaluate(model, session, rest[: test.prompt])
        last = perf_counter_ns()
    for token in rest[test.prompt :]:
        session.evaluate((token,), logits=False)
        now = perf_counter_ns()
        gaps.append(now - last)
        last = now
    return _Run(last - start, gaps)


def _evaluate(model: Model, session: Session, tokens: list[int]) -> None:
    for start in range(0, len(tokens), model.batch_rows):
        session.evaluate(tokens[start : start + model.batch_rows], logits=False)


def _model_type(model: Model, summary: Summary) -> str:
    """Return the architecture, parameter count and main format, such as "llama 1.24 B Q4_0"."""
    held: dict[str, int] = {}
    for tensor in model.file.tensors.values():
        held[tensor.format] = held.get(tensor.format, 0) + tensor.nbytes
    name = model.config.architecture if model.config is not None else "?"
    return f"{name} {parameters(summary.parameters)} {max(held, key=lambda f: held[f])}"


# -- output --------------------------------------------------------------------------------------------------------


def _decoding(text: Callable[[BenchResult], str]) -> Callable[[BenchResult], str]:
    """Return a column that is empty for prefill tests, which are not limited by memory bandwidth."""
    return lambda r: text(r) if r.bytes_per_token else ""


def _share(r: BenchResult) -> str:
    """Return the share of the memory bandwidth in percent, or "" if other programs disturbed its measurement."""
    return f"{100 * r.roof_share:.0f}" if r.roof_share <= MeasuredRoof.MOST_SHARE else ""


def _each_token(ns: Callable[[BenchResult], int]) -> Callable[[BenchResult], str]:
    """Return a column with an inter-token latency in milliseconds, which is empty for tests without decode."""
    return lambda r: f"{ns(r) / 1e6:.2f}" if r.n_gen else ""


def _picture(ns: Callable[[BenchResult], int]) -> Callable[[BenchResult], str]:
    """Return a column with a time in milliseconds, which is empty for tests without a picture."""
    return lambda r: f"{ns(r) / 1e6:.1f}" if r.image else ""


def _guessing(text: Callable[[BenchResult], str]) -> Callable[[BenchResult], str]:
    return lambda r: text(r) if r.speculation else ""


# Columns of the Markdown table: width, whether numeric, and a function for the cell. All but the last few match
# llama-bench.
_COLUMNS: dict[str, tuple[int, bool, Callable[[BenchResult], str]]] = {
    "model": (26, False, lambda r: r.model_type),
    "size": (10, True, lambda r: size(r.model_size)),
    "params": (8, True, lambda r: parameters(r.model_n_params)),
    "backend": (7, False, lambda r: r.backends),
    "threads": (7, True, lambda r: str(r.n_threads)),
    "ngl": (4, True, lambda r: r.n_gpu_layers),
    "type_k": (6, True, lambda r: r.type_k),
    "type_v": (6, True, lambda r: r.type_v),
    "test": (14, True, lambda r: r.test),
    "t/s": (20, True, lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}"),
    "GB/s": (7, True, _decoding(lambda r: f"{r.gb_per_s:.2f}")),
    "roof GB/s": (9, True, _decoding(lambda r: f"{r.roof_gb_per_s:.2f}")),
    "% of roof": (9, True, _decoding(_share)),
    "GOP/s": (8, True, lambda r: f"{r.gop_per_s:.1f}" if r.gop_per_s else ""),
    "p50 ms": (7, True, _each_token(lambda r: r.p50_ns)),
    "p90 ms": (7, True, _each_token(lambda r: r.p90_ns)),
    "p99 ms": (7, True, _each_token(lambda r: r.p99_ns)),
    "load s": (6, True, lambda r: f"{r.load_ns / 1e9:.2f}"),
    "peak": (10, True, lambda r: size(r.peak_bytes) if r.peak_bytes else ""),
    "J/token": (8, True, lambda r: f"{r.joules_per_token:.3f}" if r.joules_per_token else ""),
    "picture tokens": (14, True, lambda r: str(r.n_image) if r.image else ""),
    "prepare ms": (10, True, _picture(lambda r: r.preprocess_ns)),
    "encode ms": (9, True, _picture(lambda r: r.encode_ns)),
    "first ms": (8, True, _picture(lambda r: r.first_token_ns)),
    "second ms": (9, True, _picture(lambda r: r.second_turn_ns)),
    "guessed by": (10, True, lambda r: r.speculation),
    "plain t/s": (9, True, _guessing(lambda r: f"{r.plain_ts:.2f}")),
    "x plain": (7, True, _guessing(lambda r: f"{r.avg_ts / r.plain_ts:.2f}")),
    "accepted": (12, True, _guessing(lambda r: f"{r.n_accepted} of {r.n_drafted}")),
}
_OF_CACHE, _OF_GUESSING = ("type_k", "type_v"), ("guessed by", "plain t/s", "x plain", "accepted")
_OF_PICTURES = ("picture tokens", "prepare ms", "encode ms", "first ms", "second ms")


def _columns(own: BenchOptions, energy: Energy) -> tuple[str, ...]:
    """Return the columns to show. As in llama-bench, the KV cache types appear only if they are not the default.

    Columns of optional measurements appear only if they were measured.
    """
    cache = any(load.cache_types != ("f16", "f16") for load in own.loads)
    layers = () if own.gpu_layers != ("auto",) else ("ngl",)
    absent = {*layers, *(() if cache else _OF_CACHE), *(() if own.speculates else _OF_GUESSING)}
    absent |= set() if own.image else set(_OF_PICTURES)
    absent |= set() if energy.counters else {"J/token"}
    return tuple(name for name in _COLUMNS if name not in absent)


@contextmanager
def _markdown(names: tuple[str, ...]) -> Iterator[Show]:
    widths, right = tuple(_COLUMNS[n][0] for n in names), tuple(n for n in names if _COLUMNS[n][1])
    if 0 < room() < sum(widths) + 3 * len(widths) + 1:
        yield _records(names)
        return
    rule = tuple("-" * (w - 1) + ":" if n in right else "-" * w for n, w in zip(names, widths, strict=True))
    for row in (names, rule):
        print(markdown_row(names, row, widths, right), flush=True)

    def show(result: BenchResult) -> None:
        print(markdown_row(names, tuple(_COLUMNS[n][2](result) for n in names), widths, right), flush=True)

    yield show


def _records(names: tuple[str, ...]) -> Show:
    """Return a function that prints each result as a block of lines, for terminals too narrow for the table.

    The name of the model precedes the first block of each model.
    """
    last: tuple[str, ...] = ()

    def show(result: BenchResult) -> None:
        nonlocal last
        cells = tuple(_COLUMNS[n][2](result) for n in names)
        first = names.index("test")
        if cells[:first] != last:
            last = cells[:first]
            print(record(names[:first], last, room()) + "\n", flush=True)
        print(record(names[first:], cells[first:], room()) + "\n", flush=True)

    return show
