"""Rotations with several axes: every pair turns by the position on its own axis, alone and in fused operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, CacheTypes, Executable
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Batch, Plan, Recorder, Rope, RopeStyle, Value
from tests.backends.support import bind, record
from tests.models.support import MemoryWeight

STYLES: tuple[RopeStyle, ...] = ("interleaved", "neox")
HEAD, HEADS, N_ROT = 24, 3, 20
FREQUENCIES = tuple(0.8**i for i in range(N_ROT // 2))
AXES = (0, 1, 2, 0, 1, 2, 0, 0, 3, 1)
TABLE = MemoryWeight.of("table", np.random.RandomState(3).standard_normal((37, HEAD * HEADS)))
WEIGHT = MemoryWeight.of("weight", np.linspace(0.5, 1.5, HEAD))
EXACT = CacheTypes("f32", "f32")


def rope(style: RopeStyle, axes: tuple[int, ...] = AXES) -> Rope:
    return Rope(style, N_ROT, FREQUENCIES, axes=axes)


def turned(style: RopeStyle, axes: tuple[int, ...] = AXES) -> Plan:
    return record(TABLE, lambda r, x: r.rotate(x, HEAD, rope(style, axes)))


def attended(style: RopeStyle, axes: tuple[int, ...] = AXES) -> Plan:
    """Normalize and rotate queries and keys, attend, and rotate the ends of the heads of the rows with logits."""

    def build(r: Recorder, x: Value) -> Value:
        q, k = (r.rms_norm(r.scale(x, factor), WEIGHT, 1e-5, HEADS) for factor in (1.0, -0.5))
        q, k = (r.rotate(each, HEAD, rope(style, axes)) for each in (q, k))
        r.append(k, r.scale(x, 2.0), HEADS)
        y = r.select_rows(r.attention(q, 0, HEADS, HEAD**-0.5))
        ends = r.rotate(r.slice(y, HEAD - N_ROT, HEAD, HEADS), N_ROT, rope(style, axes))
        return r.concat(r.slice(y, 0, HEAD - N_ROT, HEADS), ends, HEADS)

    return record(TABLE, build)


def batch(rows: int, axes: np.ndarray | None) -> Batch:
    own = np.arange(rows, dtype=np.int32)
    return Batch(own % 37, own, own, np.zeros_like(own), np.array([[0]], np.int32), own, axes=axes)


def positions(rows: int, count: int = 4) -> np.ndarray:
    return np.random.RandomState(rows).randint(0, 60, (rows, count)).astype(np.int32)


def bound(backend: Backend, plan: Plan) -> Executable:
    return bind(backend, plan, rows=40, blocks=1, cache=EXACT)


def check_axes(backend: Backend, style: RopeStyle) -> None:
    """Compare with the reference for few and many rows, and with a wider `Batch.axes`.

    Without `Batch.axes`, the bits are those of a rotation without axes.
    """
    for make in (turned, attended):
        ours, theirs, plain = bound(backend, make(style)), bound(ReferenceBackend(), make(style)), make(style, ())
        plainly = bound(backend, plain)
        for rows in (1, 5, 40):
            axes = positions(rows)
            truth = theirs.step(batch(rows, axes)).copy()
            found = ours.step(batch(rows, axes)).copy()
            np.testing.assert_allclose(found, truth, rtol=0, atol=2e-5)
            wide = np.concatenate([axes, axes[:, :1] + 1], axis=1)
            np.testing.assert_array_equal(ours.step(batch(rows, wide)), found)
            np.testing.assert_array_equal(ours.step(batch(rows, None)), plainly.step(batch(rows, None)))
        for executable in (ours, theirs, plainly):
            executable.close()


@pytest.mark.parametrize("style", STYLES)
def test_the_reference_turns_each_pair_by_its_axis(style: RopeStyle) -> None:
    axes = positions(7)
    found = bound(ReferenceBackend(), turned(style)).step(batch(7, axes)).reshape(7, HEADS, HEAD)
    x = TABLE.values()[:7].reshape(7, HEADS, HEAD).astype(np.float64)
    for pair, axis in enumerate(AXES):
        a, b = (2 * pair, 2 * pair + 1) if style == "interleaved" else (pair, pair + N_ROT // 2)
        turn = np.exp(1j * axes[:, axis] * FREQUENCIES[pair])[:, None] * (x[:, :, a] + 1j * x[:, :, b])
        np.testing.assert_allclose(found[:, :, a] + 1j * found[:, :, b], turn, atol=1e-6)
    np.testing.assert_array_equal(found[:, :, N_ROT:], x[:, :, N_ROT:].astype(np.float32))


@pytest.mark.parametrize("style", STYLES)
def test_cpu(cpu: CpuBackend, style: RopeStyle) -> None:
    check_axes(cpu, style)


def test_bits_do_not_depend_on_the_batch(cpu: CpuBackend) -> None:
    ours, axes = bound(cpu, attended("neox")), positions(40)
    whole, last = batch(40, axes), np.arange(25, 40)
    truth = ours.step(whole).copy()
    assert whole.axes is not None
    first = whole.piece(np.arange(25))[0]
    np.testing.assert_array_equal(ours.step(first), truth[:25])
    np.testing.assert_array_equal(ours.step(whole.piece(last)[0]), truth[25:])
    some = replace(whole, logit_rows=np.array([30, 3], np.int32))
    np.testing.assert_array_equal(ours.step(some), truth[[30, 3]])


def test_wrong_axes_are_refused(cpu: CpuBackend) -> None:
    for backend in (cpu, ReferenceBackend()):
        ours, axes = bound(backend, turned("neox")), positions(5)
        for wrong, problem in (
            (axes[:, :3], "axes must hold 4 positions for each of 5 rows"),
            (axes[:4], "axes must hold 4 positions for each of 5 rows"),
            (axes - 60, "axes must be from 0 to 511"),
            (axes + 460, "axes must be from 0 to 511"),
        ):
            with pytest.raises(BackendError, match=problem.replace("511", "63")):
                ours.step(batch(5, wrong))
    with pytest.raises(AssertionError, match="axes"):
        Rope("neox", 4, (1.0, 0.5), axes=(0,))
