"""Runs a segment on a device and on the NumPy reference, and compares the results.

The device runs every step twice, and both results must be bitwise identical. In the first run, memory that a kernel
must not read holds NaN; in the second run, it holds other values. The second run also uses other cache blocks, and
records and replays its launches. So a stale value from another kernel, or a missing barrier, is detected unless it
makes no difference in both runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.gpu.conformance.samples import EXPERTS, PERIOD, sample_inputs
from localllm.backends.gpu.conformance.segments import Segment
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.executable import GpuExecutable
from localllm.backends.gpu.kernels.kernel import FEW_ROWS
from localllm.backends.gpu.kernels.signatures import source_text
from localllm.backends.reference import ReferenceExecutable
from localllm.base.printable import printable
from localllm.plan import (
    BLOCK,
    F32,
    Append,
    Attention,
    Batch,
    Concat,
    Convolve,
    Embed,
    Experts,
    GaussianTopK,
    HeadLinear,
    Linear,
    LinearAttention,
    Operation,
    Plan,
    Pool,
    Rows,
    SelectiveScan,
    Send,
    Slice,
    Value,
    Wkv,
    flattened,
)

# Batch size of each step: one step for each kernel choice by number of rows (`kernel.FEW_ROWS`, `products.SOME_ROWS`).
ROWS = (70, 19, 9, 1)
# Batch sizes for large products on a CPU device, where all steps would take minutes. 17 and 70 rows differ only on
# tensor cores.
FEWER_ROWS = (17, 2, 1)
MUCH = 1 << 26  # minimum number of multiplications per row that makes a product large
# Batch size of each step of a growing sequence, which reaches the second partition of attention.
GROWING = (70, 3, 1, 1, 1, 19, 150, 12, 1, 1)
BLOCKS = 5  # cache blocks per sequence
DISTINCT = 7  # number of distinct rows if the reference is slow; further rows repeat these
TEXT = 5  # rows of the encoder text
SHOWN = 300  # characters shown of a driver's error
WANTED = 5  # number of largest logits to search for

# Limits of the error: root mean square over a row, divided by the root mean square of the exact row. A single value may
# have PEAK times this error. Sums differ in their order; int8 products have half a percent of error on rows that int8
# cannot hold exactly. Some operations subtract nearly equal values.
CLOSE, DIFFERENCES, ROUNDED, TWICE_ROUNDED = 2e-5, 1e-3, 0.1, 0.2
# Limits of the error of stored keys and values, by cache type. A value halfway between two representable ones may round
# either way.
STORED = {"f32": 2e-5, "f16": 1e-3, "bf16": 4e-3, "fp8": 1e-2}
STORED_IN_BLOCKS = 3e-2
PEAK = 16.0
NARROW = 32  # values per row; a narrower row may be a sum that cancels
SMALL = 1e-3  # minimum row magnitude in the relative error, as a share of the root mean square of all rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one operation, or of several operations that are checked together."""

    operation: str
    kernels: tuple[str, ...] = ()
    error: float = 0.0  # largest error, to be compared with `limit`
    limit: float = 0.0
    problem: str = ""  # "" if the check passed
    skipped: str = ""  # reason for skipping, or ""
    broken: bool = False  # whether a driver call failed
    lost: bool = False  # whether the device stopped working, so that nothing more can be checked

    @property
    def failed(self) -> bool:
        return bool(self.problem)

    @property
    def status(self) -> str:
        return "skipped" if self.skipped else "failed" if self.failed else "passed"


class Wrong(Exception):
    """Raised if the device computes wrong results. The message says how the results differ."""


def run_segments(device: Device, segment: Segment, limits: Limits, cache: CacheTypes) -> Verdict:
    """Check a segment.

    Raises BackendError if the device cannot start, for example for lack of memory. Later failures are part of the
    verdict.
    """
    try:
        check = _Check(device, segment, limits, cache)
    except device.errors as error:
        return Verdict(segment.title, problem=told(error), broken=True)
    problem, broken = "", False
    try:
        for steps in (check.compare, check.spread) if not check.grows else (check.compare,):
            steps()
    except Wrong as wrong:
        problem = str(wrong)
    except _errors(device) as error:
        problem, broken = told(error), True
    finally:
        try:
            check.close()
        except _errors(device) as error:  # after a failure, an error in cleanup is only a consequence
            problem, broken = problem or told(error), True
    return Verdict(segment.title, (), check.error, check.limit, problem, broken=broken)


def uncompiled(device: Device) -> str:
    """Return why a device cannot compile the kernel that every check needs, or "" if it can."""
    try:
        device.compile(*_residue(device))
    except _errors(device) as error:
        return told(error).removeprefix(f"{device.facts.name}: ")
    return ""


def answers(device: Device) -> bool:
    """Return whether a device still works. After some failures, all later calls of a context fail."""
    sent, found = np.array([ODD], np.uint32), np.zeros(1, np.uint32)
    try:
        buffer = device.alloc(sent.nbytes, "a check")
        try:
            device.upload(buffer, 0, sent)
            device.download(buffer, 0, found)
            device.sync()
        finally:
            device.free(buffer)
    except _errors(device):
        return False
    return bool(found[0] == sent[0])


def _errors(device: Device) -> tuple[type[Exception], ...]:
    """Return the exceptions that a device call may raise."""
    return (BackendError, *device.errors)


def told(error: Exception) -> str:
    """Return the first line of a driver's error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return printable(lines[0], SHOWN)


def limit_of(segment: Segment, cache: CacheTypes) -> float:
    """Return the largest error that is allowed for a segment."""
    flat = flattened(segment.operations)
    if segment.rounds and any(isinstance(op, Experts) for op in flat):  # experts round input and hidden states
        return TWICE_ROUNDED
    if segment.rounds:
        return ROUNDED
    if any(isinstance(op, LinearAttention | SelectiveScan | Wkv | Pool | Convolve | GaussianTopK) for op in flat):
        return DIFFERENCES
    return max(STORED.get(name, STORED_IN_BLOCKS) for name in (cache.keys, cache.values)) if segment.stored else CLOSE


class _Check:
    """A segment, bound to a device and to the reference."""

    def __init__(self, device: Device, segment: Segment, limits: Limits, cache: CacheTypes) -> None:
        self._segment, self._device = segment, device
        self._flat = flattened(segment.operations)
        self.grows = bool(segment.plan.layers)
        self._repeats = any(isinstance(op, Experts | HeadLinear) for op in self._flat) and not self.grows
        self._after = any(isinstance(op, Attention) and op.after for op in self._flat)
        self._whole = not segment.plan.causal and not self._after
        work = sum(op.flops for op in self._flat) // 2
        self._once = device.facts.compute == "CPU" and work > MUCH and not self.grows
        self.error, self.limit = 0.0, limit_of(segment, cache)
        own = replace(limits, blocks=2 * BLOCKS, window_blocks=2 * BLOCKS * bool(limits.window_blocks))
        self._limits = limits
        self._reference = _Reference(segment, own, cache)
        self._local = _Residue(device)
        try:
            self._ours = GpuExecutable(device, segment.plan, own, cache, None, ())
        except BaseException:
            self._local.close()
            raise

    def close(self) -> None:
        try:
            self._ours.close()
        finally:
            self._local.close()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[tuple[int, int]]:
        """Yield (first position, rows) of every step."""
        most = self._limits.rows
        if self._segment.makes_logits and self._segment.plan.logits.rows == "batch":  # embeddings: one per row
            most = min(most, self._limits.logit_rows)
        at = TEXT if self._after else 0
        of_text = (*ROWS, 150) if self._whole else GROWING
        for count in of_text if self.grows else FEWER_ROWS if self._once else ROWS:
            start = at if self.grows and not self._whole else 5 * (not self.grows)
            count = min(count, most, self._limits.positions - start)
            if count <= 0:
                return
            yield start, count
            at += count

    def _counts(self, count: int) -> dict[Rows, int]:
        """Return the row counts of a step: of the batch, and of the logits if the segment has values for logit rows."""
        wanted = any(value.rows == "logits" for op in self._flat for value in (*op.inputs, *op.outputs))
        wanted |= self._segment.makes_logits
        return {"batch": count, "logits": min(count, self._limits.logit_rows) if wanted else 0}

    def _batch(self, at: int, count: int, way: int) -> Batch:
        """Return a batch of consecutive positions. The second run (`way` 1) uses other cache blocks."""
        positions = np.arange(at, at + count, dtype=np.int32)
        numbers = np.arange(2 * BLOCKS, dtype=np.int32)
        table = (numbers[::2] if way == 0 else numbers[::-2])[None]
        slots = (table[0][positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
        rows = np.arange(count - self._counts(count)["logits"], count, dtype=np.int32)
        border = np.array([TEXT if self._after else at + count], np.int32)
        borders = border if self._whole or self._after else None
        tokens, sequence = self._tokens(at, count), np.zeros(count, np.int32)
        windowed = bool(self._limits.window_blocks)
        return Batch(
            tokens, positions, slots, sequence, table, rows, slots if windowed else None, table if windowed else None,
            borders, span_ends=self._span_ends(positions),
        )  # fmt: skip

    def _span_ends(self, positions: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Return spans of up to 23 positions, if the segment has spans."""
        if not any(isinstance(op, Attention) and op.spans for op in self._flat):
            return None
        ends: NDArray[np.int32] = np.minimum(positions // 23 * 23 + 22, positions[-1]).astype(np.int32)
        return ends

    def _tokens(self, at: int, count: int) -> NDArray[np.int32]:
        tables = [op.table.shape[0] for op in self._flat if isinstance(op, Embed) and not op.positions]
        if self._segment.plan.media:  # every third token is a media token
            return np.where(np.arange(at, at + count) % 3 == 0, -1, 0).astype(np.int32)
        if not tables:
            return np.zeros(count, np.int32)
        random = np.random.RandomState(at)
        found = random.randint(0, min(tables), count)
        found[0] = min(tables) - 1
        return found.astype(np.int32)

    def _received(self, at: int, count: int) -> list[F32]:
        """Return rows for every received value.

        If the reference is slow, the rows repeat DISTINCT different rows.
        """
        counts, pairs = self._counts(self._few(count)), zip(self._segment.received, self._segment.kinds, strict=True)
        found = {
            value: sample_inputs(kind, (value.index, at, count), counts[value.rows], value) for value, kind in pairs
        }
        for op in self._flat:
            if isinstance(op, Append) and op.v is not None and op.k in found and op.v in found:
                layer = self._segment.plan.attention_layer(op.layer)
                if layer.prefix:  # values equal the first dimensions of the keys
                    keys = found[op.k].reshape(-1, layer.kv_heads, layer.head_dim)
                    found[op.v] = np.ascontiguousarray(keys[:, :, : layer.value_dim]).reshape(found[op.v].shape)
        return list(found.values())

    def _few(self, count: int) -> int:
        """Return the number of rows that the reference computes."""
        return min(count, DISTINCT) if self._repeats else count

    def _expected(self, at: int, count: int, received: list[F32]) -> list[F32]:
        found = self._reference.step(self._batch(at, self._few(count), 0), received)
        sent = self._segment.sent or (self._segment.plan.logits,)
        return self._repeated(found, sent, count)

    def _repeated(self, rows: list[F32], values: Sequence[Value], count: int) -> list[F32]:
        """Expand the rows that the reference computes to all rows of the step."""
        counts = self._counts(count)
        shapes = [(counts[value.rows], value.width) for value in values]
        return [
            own if own.shape == shape else np.ascontiguousarray(np.resize(own, shape))
            for own, shape in zip(rows, shapes, strict=True)
        ]

    # -- comparing -----------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Run all steps in both ways, and compare the results with the reference."""
        expected: list[list[F32]] = []
        first: list[list[F32]] = []
        for way in (0,) if self._once else (0, 1):
            for number, (at, count) in enumerate(self._steps()):
                received = self._received(at, count)
                if way == 0:
                    expected.append(self._expected(at, count, received))
                self._ours.spoil(NAN if way == 0 else ODD)
                self._local.leave(NAN if way == 0 else ODD)
                found = self._step(at, count, way, received)
                if way == 0:
                    self._judge(found, expected[number], count)
                    first.append(found)
                else:
                    self._same(found, first[number], count, "another run")
                if not self.grows and count <= FEW_ROWS and way == 0 and not self._once:
                    for what in ("the run that is recorded", "the run that is replayed"):
                        self._same(self._step(at, count, way, received), found, count, what)

    def spread(self) -> None:
        """Check that a NaN in an input row makes that row of the result NaN, and no other row."""
        count = min(9, self._limits.rows, self._limits.logit_rows)
        received = self._received(5, count)
        if not received or count < 3:
            return
        received = [rows.copy() for rows in received]
        received[0][1, -1] = np.nan
        found = self._step(5, count, 0, received)
        for own, truth in zip(found, self._expected(5, count, received), strict=True):
            ours, theirs = (np.flatnonzero(np.isnan(rows).any(axis=1)).tolist() for rows in (own, truth))
            if ours != theirs:
                raise Wrong(f"NaN in row 1 of {count}: rows {ours} of the result have one in place of {theirs}")

    def _step(self, at: int, count: int, way: int, received: list[F32]) -> list[F32]:
        ours = self._ours
        ours.begin(self._batch(at, count, way))
        found = ours.run(self._repeated(received, self._segment.received, count))
        if not self._segment.makes_logits:
            return [rows.copy() for rows in found]
        logits = ours.result().copy()
        wanted = min(WANTED, logits.shape[1])
        picked = ours.result_top_k(wanted)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :wanted]
        if not np.isnan(logits).any() and not np.array_equal(picked.ids, order):
            raise Wrong(f"{count} rows: the largest logits are not those that the device has computed")
        return [logits]

    def _judge(self, found: list[F32], expected: list[F32], count: int) -> None:
        for own, truth in zip(found, expected, strict=True):
            if not np.isfinite(own).all():
                raise Wrong(f"{count} rows: {int((~np.isfinite(own)).sum())} numbers are not finite")
            off = own.astype(np.float64) - truth
            size = np.sqrt((truth.astype(np.float64) ** 2).mean(axis=1))
            least = 1.0 if self.limit >= ROUNDED else SMALL if own.shape[1] >= NARROW else 0.25
            size = np.maximum(size, max(least * np.sqrt((size**2).mean()), 1e-30))
            error = float((np.sqrt((off**2).mean(axis=1)) / size).max())
            peak = float((np.abs(off).max(axis=1) / size).max())
            self.error = max(self.error, error, peak / PEAK)
            if self.error > self.limit:
                raise Wrong(f"{count} rows: off by {error:.1e} of a row, and {peak:.1e} in one number")

    def _same(self, found: list[F32], before: list[F32], count: int, what: str) -> None:
        for own, other in zip(found, before, strict=True):
            if own.tobytes() != other.tobytes():
                raise Wrong(f"{count} rows: {what} gave different bits")


NAN, ODD = 0x7FC00000, 0x41973C5A  # bit patterns for memory that no kernel may read: NaN, then 18.9


class _Residue:
    """Fills the local memory of a device with a bit pattern for the next kernel to find."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._groups = 16 if device.facts.compute == "CPU" else GROUPS
        kernel = device.compile(*_residue(device))
        self._buffers: list[Any] = []  # the input pattern and the output
        try:
            for length in (4, 4 * GROUPS):
                self._buffers.append(device.alloc(length, "a check"))
            self._launch = device.prepare(kernel, 128, _filled(device), self._buffers)
        except BaseException:
            self.close()
            raise

    def leave(self, bits: int) -> None:
        self._device.upload(self._buffers[0], 0, np.array([bits], np.uint32))
        self._launch((self._groups, 1, 1))

    def close(self) -> None:
        for buffer in self._buffers:
            self._device.free(buffer)


def _filled(device: Device) -> int:
    """Return the number of local memory bytes to fill."""
    return min(device.facts.local_memory, LOCAL)


def _residue(device: Device) -> tuple[str, str]:
    """Return the source and the name of the kernel that fills local memory."""
    return f"#define COUNT {_filled(device) // 4}\n{source_text('prelude')}{LEAVE}", "leave"


GROUPS = 1024  # more work-groups than any GPU runs at a time
LOCAL = 48 << 10  # maximum bytes to fill
LEAVE = """
KERNEL(128, leave)(GLOBAL const int *number, GLOBAL int *y LOCAL_ARGUMENT) {
  LOCAL_MEMORY
  LOCAL int *s = (LOCAL int *)local_memory;
  for (int i = ITEM; i < COUNT; i += 128) s[i] = number[0];
  BARRIER();
  if (s[(37 * ITEM + GROUP_X) % COUNT] != number[0]) y[GROUP_X] = 1;  // so that no compiler leaves out the stores
}
"""


# -- the reference -----------------------------------------------------------------------------------------------------


class _Cycled:
    """The matrices of an expert stack in which the same few experts repeat."""

    def __init__(self, matrices: F32) -> None:
        self._matrices = matrices

    def __getitem__(self, expert: int) -> F32:
        found: F32 = self._matrices[expert % len(self._matrices)]
        return found


class _Reference(ReferenceExecutable):
    """Runs a segment on the NumPy reference. Large matrices are computed from their distinct rows."""

    def __init__(self, segment: Segment, limits: Limits, cache: CacheTypes) -> None:
        self._few: set[str] = set()  # stacks with few distinct experts
        self._tables = [op.table.shape[0] for op in flattened(segment.operations) if isinstance(op, Embed)]
        plan = self._shortened(segment.plan)
        positions = BLOCKS * BLOCK
        super().__init__(plan, replace(limits, positions=positions, rows=256, logit_rows=256), cache, _quiet)
        weights: dict[str, Any] = self._weights
        weights |= {name: _Cycled(self._weights[name]) for name in self._few}

    def step(self, batch: Batch, received: list[F32] | None = None) -> list[F32]:  # type: ignore[override]
        tokens = batch.tokens % PERIOD if any(rows > PERIOD for rows in self._tables) else batch.tokens
        self.begin(replace(batch, tokens=tokens))
        found = self.run(received or ())
        return (
            [rows.copy() for rows in found] if isinstance(self._plan.operations[-1], Send) else [self.result().copy()]
        )

    def _shortened(self, plan: Plan) -> Plan:
        """Return the plan with each large matrix reduced to its distinct rows."""
        made, values = list[Operation](), list(plan.values)

        def value(width: int, like: Value) -> Value:
            values.append(Value(len(values), width, like.rows, like.name))
            return values[-1]

        for op in flattened(plan.operations):
            if isinstance(op, Embed) and not op.positions and op.table.shape[0] > PERIOD:
                op = replace(op, table=op.table.part(0, PERIOD))
            if isinstance(op, Experts):
                stacks = {name: self._of_few(getattr(op, name)) for name in ("gate", "up", "down")}
                op = replace(op, **stacks)
            if not isinstance(op, Linear) or op.out.width <= PERIOD:
                made.append(op)
                continue
            rows = value(PERIOD, op.out)
            bias = None if op.bias is None else op.bias.part(0, PERIOD)
            made.append(replace(op, out=rows, weight=op.weight.part(0, PERIOD), bias=bias))
            while rows.width < op.out.width:
                twice = value(2 * rows.width, op.out)
                made.append(Concat(twice, rows, rows, 1))
                rows = twice
            made.append(Slice(op.out, rows, 1, 0, op.out.width))
        return replace(plan, operations=tuple(made), values=tuple(values))

    def _of_few(self, stack: Any) -> Any:
        if stack.weight.shape[0] <= EXPERTS:
            return stack
        own = stack.weight.part(0, EXPERTS)
        self._few.add(own.name)
        return replace(stack, weight=own)


def _quiet(what: str, done: int, total: int) -> None: ...
