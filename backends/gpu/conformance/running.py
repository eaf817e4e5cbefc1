"""Runs a segment on a device and on the NumPy reference, and compares the results.

The device runs every step twice, and both results must be bitwise identical. In the first run, memory that a kernel
must not read holds NaN; in the second run, it holds other values. The second run also uses other cache blocks, and
records and replays its launches. So a stale value from another kernel, or a missing barrier, is detected unless it
makes no difference in both runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.gpu.conformance.reference import BLOCKS, SegmentReference
from localllm.backends.gpu.conformance.residue import NAN, ODD, Residue, residue_kernel
from localllm.backends.gpu.conformance.samples import sample_inputs
from localllm.backends.gpu.conformance.segments import Segment
from localllm.backends.gpu.conformance.tolerances import NARROW, PEAK, ROUNDED, SMALL, limit_of
from localllm.backends.gpu.device import Device
from localllm.backends.gpu.executable import GpuExecutable
from localllm.backends.gpu.kernels.kernel import FEW_ROWS
from localllm.base.printable import printable
from localllm.plan import (
    BLOCK,
    F32,
    Append,
    Attention,
    Batch,
    Embed,
    Experts,
    HeadLinear,
    Rows,
    Value,
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
DISTINCT = 7  # number of distinct rows if the reference is slow; further rows repeat these
TEXT = 5  # rows of the encoder text
SHOWN = 300  # characters shown of a driver's error
WANTED = 5  # number of largest logits to search for


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
        device.compile(*residue_kernel(device))
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
        self._reference = SegmentReference(segment, own, cache)
        self._local = Residue(device)
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
