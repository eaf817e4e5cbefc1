"""Forecast the tokens per second of decoding on the processor, before a model is loaded.

The time of a token is the time to multiply by each matrix, to read the cache, and to start the kernels. `DecodeSpeed`
measures these speeds with the kernels that decode, in a tenth of a second for each weight format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import CacheTypes, Limits
from localllm.base.closing import Closing
from localllm.base.machine.memory import memory as system_memory
from localllm.base.machine.processor import usable_threads
from localllm.gguf import GGUFFile
from localllm.hub.short_names import KnownModel
from localllm.loading.loader import DEFAULT_CONTEXT, context_of, limits_of
from localllm.models import ARCHITECTURES, Config, architecture_of, read_config, record
from localllm.options.diffusion import CANVAS
from localllm.plan import BLOCK, Batch, Embed, Plan, Recorder
from localllm.quant import FORMATS, row_bytes

if TYPE_CHECKING:
    from localllm.backends.cpu.backend import CpuExecutable

READ, LEAST = 128 << 20, 1 << 20  # bytes of the measured matrices together, but not more than a token reads
WIDTHS = (4096, 2048, 1024, 512, 256)  # of the square matrices that are measured, one after the other
MATRICES = 8  # minimum number of measured matrices
PASSES = 12
MANY, PASSES_OF_MANY = 32, 3  # passes of many rows are long; they are measured a few times
READ_BY_MANY = 32 << 20  # bytes of the matrices for them: they take time to compute, not to read
CHAIN, NARROW = 64, 96  # small products in a row, to time kernel calls, and their width
CALLS = 500  # kernel calls of a token in a model with 30 layers, where no plan is known
_DISTINCT = 64  # random rows, which repeat


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The work of decoding one token."""

    weights: Mapping[str, int]  # bytes of matrices that are read, by format; experts: only the ones used
    cache: int = 0  # bytes of keys, values and recurrent states
    calls: int = CALLS  # kernel calls
    held: Mapping[str, int] = field(default_factory=dict)  # bytes of all these matrices, by format
    output: Mapping[str, int] = field(default_factory=dict)  # part of `weights` that only gives logits

    @property
    def bytes(self) -> int:
        return sum(self.weights.values()) + self.cache


class Planned(NamedTuple):
    """The plan of a model file for a context of `context` tokens."""

    config: Config
    plan: Plan
    limits: Limits
    context: int
    diffuses: bool


@dataclass(slots=True)
class Fastest:
    """The shortest times of several measurements. Other programs only slow a measurement down."""

    products: dict[tuple[str, int, int], float] = field(default_factory=dict)  # whole steps; keys as in `DecodeSpeed`
    read: float = 0.0  # bytes per second
    one: float = inf  # a step of one product without work
    chain: float = inf  # a step of CHAIN of them


def planned(file: GGUFFile, ctx_size: int) -> Planned:
    """Return the plan of a file, whose weights are not read. Raise ModelError if the architecture is not supported."""
    architecture = architecture_of(file.metadata)
    config, diffuses = read_config(file.metadata, architecture.name), architecture.diffusion
    context = context_of(ctx_size, config, CANVAS if diffuses else DEFAULT_CONTEXT)
    plan = record(config, ARCHITECTURES[config.architecture], file.tensors, context)
    return Planned(config, plan, limits_of(context, plan, diffuses=diffuses), context, diffuses)


def cost_of(plan: Plan, limits: Limits, cache: CacheTypes, tokens: int) -> TokenCost:
    """Return the cost of a token after `tokens` tokens in the cache. Raise BackendError if the CPU cannot run the
    plan."""
    from localllm.backends.cpu import bind
    from localllm.backends.cpu.budget import memory
    from localllm.backends.cpu.isa import host

    threads = usable_threads()
    program = bind.program(plan, limits, threads, host(), cache)
    found = memory(plan, program, limits, threads, cache)
    weights: dict[str, int] = {}
    every: dict[str, int] = {}
    output: dict[str, int] = {}
    for op in plan.operations:
        for read in () if isinstance(op, Embed) else op.reads:
            if read.weight.name in program.panels:
                format_, size = read.weight.format, read.weight.bytes
                weights[format_] = weights.get(format_, 0) + read.share(size)
                every[format_] = every.get(format_, 0) + size
                if plan.logits in op.outputs:
                    output[format_] = output.get(format_, 0) + size
    cached = int(found.read_after(tokens)) - found.weights_per_token
    return TokenCost(weights, cached, len(program.calls), every, output)


def cost_of_known(model: KnownModel) -> TokenCost:
    """Return the cost of a token of a model that is not on this computer. All matrices count in their main format."""
    format_ = max((name for name in FORMATS if model.quant.startswith(name)), key=len, default="Q8_0")
    return TokenCost({format_: int(model.bytes * model.read)})


class DecodeSpeed(Closing):
    """Measures what decoding takes on this computer with all threads. Results are kept for further models.

    Raises BackendError if the kernels cannot run here.
    """

    def __init__(self, threads: int | None = None, fastest: Fastest | None = None) -> None:
        """`fastest` has the shortest times of earlier measurements with the same threads. It is updated."""
        from localllm.backends.cpu.backend import CpuBackend

        self._fastest = fastest if fastest is not None else Fastest()
        self._backend = CpuBackend(threads or usable_threads())
        self._products: dict[tuple[str, int, int], float] = {}
        self._reads = self._call = self._step = 0.0

    def tokens_per_second(self, cost: TokenCost) -> float:
        """Return the forecast for a model. Its first call for a format takes about a tenth of a second."""
        return 1 / self.seconds(cost)

    def seconds(self, cost: TokenCost, rows: int = 1) -> float:
        """Return the forecast for a pass of `rows` rows of different sequences. The rows of a mixture of experts
        use experts at random.
        """
        return self._seconds(cost, rows) + (rows * cost.cache / self._read() if cost.cache else 0.0)

    def prompt_seconds(self, cost: TokenCost, rows: int) -> float:
        """Return the forecast for a pass of `rows` rows of one prompt. They share a read of the cache, and only the
        last one needs logits.
        """
        body, held = dict(cost.weights), dict(cost.held)
        for name, size in cost.output.items():
            body[name], held[name] = body[name] - size, held.get(name, size) - size
        seconds = self._seconds(TokenCost(body, 0, cost.calls, held), rows)
        if cost.output:
            seconds += self._seconds(TokenCost(cost.output, 0, 0, cost.output), 1) - self._step
        return seconds + (cost.cache / self._read() if cost.cache else 0.0)

    def _seconds(self, cost: TokenCost, rows: int) -> float:
        """Return the seconds of a pass without reading the cache."""
        self._measure_calls()
        most = _most() if rows < MANY else min(_most(), READ_BY_MANY)
        size = max(LEAST, min(most, sum(cost.weights.values())))
        seconds = 0.0
        for name, held in cost.weights.items():
            if not held:
                continue
            every = max(cost.held.get(name, held), held)
            read = every * (1 - (1 - held / every) ** rows)
            seconds += read / self._product(name, size, max(1, round(rows * held / read)))
        return seconds + cost.calls * self._call + self._step

    def _product(self, format_: str, size: int, rows: int = 1) -> float:
        """Return the bytes per second at which products with `rows` rows read matrices of this size together."""
        if (format_, size, rows) not in self._products:
            block = FORMATS[format_].block_values
            held = {width: width * row_bytes(format_, width) for width in WIDTHS if width % block == 0}
            width = next((each for each in held if held[each] * MATRICES <= size), min(held))
            count = max(size // held[width], 1)
            # the last product is for one row: it computes the logits
            seconds, calls = self._timed(_products(format_, width, count + (rows > 1)), rows)
            known, key = self._fastest.products, (format_, size, rows)
            known[key] = min(seconds, known.get(key, inf))
            self._products[key] = count * held[width] / max(known[key] - self._step - calls * self._call, 1e-9)
        return self._products[format_, size, rows]

    def _read(self) -> float:
        """Return the bytes per second of plain reading."""
        from localllm.backends.cpu.memory import Arena
        from localllm.backends.cpu.roofs import read_rates

        if not self._reads:
            arena = Arena(max(LEAST, _most()), "a measurement of bandwidth")
            at = arena.take(arena.size)
            arena.view(at, arena.size)[:] = 1  # unwritten pages all map to one cached zero page
            backend = self._backend
            self._fastest.read = max(
                self._fastest.read, *read_rates(backend.library, backend.pool, at, arena.size, PASSES)
            )
            self._reads = self._fastest.read
        return self._reads

    def _measure_calls(self) -> None:
        """Measure the seconds of a step without work, and of each kernel call in a step."""
        if not self._step:
            (one, few), (long, many) = (self._timed(_products("F32", NARROW, count)) for count in (1, CHAIN))
            best = self._fastest
            best.one, best.chain = min(best.one, one), min(best.chain, long)
            self._call, self._step = max(best.chain - best.one, 0.0) / (many - few), best.one

    def _timed(self, plan: Plan, rows: int = 1) -> tuple[float, int]:
        """Return the seconds of a step, and its kernel calls. Only fast steps count, since other programs slow some."""
        executable, batch = self._backend.bind(plan, _limits(rows)), _batch(rows)
        try:
            times = sorted(_seconds(executable, batch) for turn in range(PASSES if rows < MANY else PASSES_OF_MANY))
            return times[len(times) // 4], len(executable.labels)
        finally:
            executable.close()

    def close(self) -> None:
        self._backend.close()


def _most() -> int:
    """Return the maximum bytes of a measurement: a small part of the free memory."""
    return min(READ, system_memory().free // 8 or READ)


def _seconds(executable: CpuExecutable, batch: Batch) -> float:
    began = perf_counter()
    executable.step(batch)
    return perf_counter() - began


def _limits(rows: int) -> Limits:
    blocks = -(-rows // BLOCK)
    return Limits(rows, 1, blocks, blocks * BLOCK)


def _batch(rows: int) -> Batch:
    numbers, zeros = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    return Batch(zeros, numbers, numbers, zeros, numbers[None, : -(-rows // BLOCK)], zeros[:1])


def _products(format_: str, width: int, count: int) -> Plan:
    """Return a plan with `count` products in a row, each with a matrix (width, width) of random weights."""
    recorder = Recorder()
    x = recorder.embed(_Random("embedding", "F32", 1, width))
    for number in range(count):
        x = recorder.linear(x, _Random(f"matrix {number}", format_, width, width))
    return recorder.finish(x)


class _Random:
    """A matrix of random bytes. A few rows repeat."""

    def __init__(self, name: str, format_: str, rows: int, columns: int) -> None:
        self.name, self.format, self.shape = name, format_, (rows, columns)
        random = np.random.default_rng(0)
        self._rows = random.integers(0, 256, (_DISTINCT, row_bytes(format_, columns)), np.uint8)
        self._rows &= 0xBF  # keeps scales finite in every format

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._rows[np.arange(start, stop) % _DISTINCT]
