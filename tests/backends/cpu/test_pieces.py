"""Kernels in pieces of few rows: what a piece costs is bounded by count, and no bit depends on the division."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from localllm.backends.allocation import Buffer
from localllm.backends.base import Limits
from localllm.backends.cpu import backend as backends
from localllm.backends.cpu import pieces, slices
from localllm.backends.cpu.arguments import Rows
from localllm.backends.cpu.backend import CpuBackend, CpuExecutable
from localllm.backends.cpu.kernels import rowwise
from localllm.backends.cpu.kernels.executor import Entry
from localllm.backends.cpu.places import CountOf, ListOf, output_to, rows_in
from localllm.backends.cpu.program import Domain, KernelCall
from localllm.plan import F32, Batch, Recorder, Weight
from localllm.plan.runs import BAND, bands
from tests.backends.attending import Heads, attend
from tests.backends.cases import CASES, RECURRENT, VOCABULARY, table
from tests.backends.support import Build, bind, feed, record
from tests.models.support import MemoryWeight

BUILDS: dict[str, Build] = {
    **{name: case.build for name, case in CASES.items()},
    **{f"recurrent {name}": build for name, build in RECURRENT.items()},
    "attention": attend(Heads(1, 1, 8)),
}
WIDTHS = {name: case.width for name, case in CASES.items()} | dict.fromkeys(map("recurrent {}".format, RECURRENT), 48)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a piece have a few rows, and a slice one piece."""
    for name, size in {"BYTES": 512, "PRODUCTS": 4096, "WRITTEN": 1024, "LEAST_ROWS": 3}.items():
        monkeypatch.setattr(pieces, name, size)
    monkeypatch.setattr(slices, "LEAST", 0.0)


class InSlices:
    """Runs each step of an executable in slices of a piece or less."""

    def __init__(self, executable: CpuExecutable) -> None:
        self.limits, self._executable, self.slices = executable.limits, executable, 0

    def step(self, batch: Batch) -> F32:
        self._executable.begin(batch)
        while self._executable.run_slice(1e-9) is None:
            self.slices += 1
        return self._executable.result()


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_pieces(small: None, name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, divided_by = list[tuple[int, int]](), pieces.divided  # numbers of pieces and calls of stages

    def recorded(calls: Sequence[KernelCall], *given: Any) -> pieces.Pieces:
        found = divided_by(calls, *given)
        made.append((len(found.entries), len(calls)))
        return found

    monkeypatch.setattr(backends, "divided", recorded)
    backend = CpuBackend(threads)
    executable: Any = bind(backend, record(table(WIDTHS.get(name, 24)), BUILDS[name]))
    tokens = np.resize(np.random.RandomState(2).permutation(VOCABULARY), 70)
    divided: Any = InSlices(executable)
    for sizes in ([], [1, 17]):
        np.testing.assert_array_equal(feed(divided, tokens, sizes), feed(executable, tokens, sizes))
    assert sum(found for found, _ in made) > sum(calls for _, calls in made)
    assert divided.slices >= sum(found - 1 for found, _ in made)  # each piece ends a slice; the last one, the step
    executable.close()
    backend.close()


# -- counts ----------------------------------------------------------------------------------------------------------

ROWS, WIDTH, FFN = 700, 96, 160


@pytest.fixture(params=["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def layer(request: pytest.FixtureRequest) -> Iterator[CpuExecutable]:
    """A feed-forward part with a residual."""
    backend, recorder, random = CpuBackend(threads=2), Recorder(), np.random.default_rng(0)

    def matrix(name: str, *shape: int) -> Weight:
        return Weight.of(MemoryWeight.of(name, random.standard_normal(shape, np.float32), request.param))

    x = recorder.receive(WIDTH, "x")
    y = recorder.activate(recorder.linear(recorder.scale(x, 0.5), matrix("up", FFN, WIDTH)), "gelu")
    recorder.end_stage(recorder.add(recorder.linear(y, matrix("down", WIDTH, FFN)), x))
    yield (executable := backend.bind(recorder.finish_stages(), Limits(ROWS, 1, 64, ROWS + 64)))
    executable.close()
    backend.close()


def batch(rows: int) -> Batch:
    numbers, zeros = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    blocks = np.arange(64, dtype=np.int32)[None]
    return Batch(zeros, numbers, numbers, zeros, blocks, zeros[:0])


def test_pieces_are_bounded_by_count(layer: CpuExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "BYTES", 1 << 14)
    monkeypatch.setattr(pieces, "PRODUCTS", 1 << 18)
    monkeypatch.setattr(pieces, "WRITTEN", 1 << 16)
    monkeypatch.setattr(pieces, "LEAST_ROWS", 8)
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH), np.float32)
    layer.begin(batch(ROWS))
    [truth] = [each.copy() for each in layer.run([x])]
    calls, threads = layer._program.calls, 2
    found = pieces.divided(calls, layer.entries, layer._arguments, {"batch": ROWS, "logits": 0}, threads)
    products = 0
    for number, call in enumerate(calls):
        own = found.entries[found.calls == number]
        if not call.products:
            assert (own[:, Entry.piece] == np.arange(len(own))).all()
            assert (own[:, Entry.pieces] == len(own)).all()
            buffers = [place.buffer for place in call.reads | call.writes if hasattr(place, "buffer")]
            rows = -(-ROWS // (threads * len(own)))
            assert (rows - 1) * sum(buffer.stride for buffer in buffers) <= 1 << 14
            continue
        products += 1
        arguments, counts = found.arguments[2 * products - 2 : 2 * products]
        assert counts.sum() == ROWS
        assert len(counts) == len(own) > 1
        assert (counts - 1).max() * call.products <= 1 << 18
        y = pieces.LinearArguments.slot("y")
        assert (counts - 1).max() * arguments[0, y + 1] <= 1 << 16
        np.testing.assert_array_equal(np.diff(arguments[:, y]), counts[:-1] * arguments[0, y + 1])
    assert products == 2
    assert {int(n) for n in np.bincount(found.calls)} != {1}
    layer.begin(batch(ROWS))
    while (sent := layer.run_slice(1e-9, [x])) is None:
        pass
    np.testing.assert_array_equal(sent[0], truth)


def test_few_rows_are_one_piece(layer: CpuExecutable) -> None:
    """The steps of a text are not divided."""
    arguments = layer._arguments
    counts = layer._storage.inputs.step()
    layer.begin(batch(5))
    assert counts[0] == 5
    found = pieces.divided(layer._program.calls, layer.entries, arguments, {"batch": 5, "logits": 0}, 2)
    assert len(found.entries) == len(layer.entries)


def test_a_piece_writes_only_its_rows(layer: CpuExecutable, small: None) -> None:
    """Slice by slice, more rows of the result are there, and those that are stay."""
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH), np.float32)
    layer.begin(batch(ROWS))
    [truth] = [each.copy() for each in layer.run([x])]
    layer.begin(batch(ROWS))
    [view] = layer._sent(0)
    view[:] = np.nan
    done = [0]
    while (sent := layer.run_slice(1e-9, [x])) is None:
        there = (view == truth).all(axis=1)
        assert there[: done[-1]].all()
        assert not there[there.sum() :].any()
        done.append(int(there.sum()))
    np.testing.assert_array_equal(sent[0], truth)
    assert len(set(done)) > 20


def call(domain: Domain, *others: Buffer) -> KernelCall:
    arguments = rowwise.MapArguments(x=rows_in(A), y=output_to(B), width=16, rows=CountOf("batch"))
    made = KernelCall("apply_silu", arguments, domain, "silu")
    made.reads |= {place for each in others for place, _ in rows_in(each).places}  # type: ignore[misc]
    return made


A, B, C = Buffer(0, "batch", 1 << 12), Buffer(1, "batch", 1 << 12), Buffer(2, "batch", 1 << 12, 2)


def test_only_rows_are_divided() -> None:
    counts: Any = {"batch": 4096, "logits": 3}
    assert pieces.row_pieces(call("batch"), counts, 2) == 4096 * 8192 // (2 << 20)
    assert pieces.row_pieces(call("batch", C), counts, 2) == 4096 * 16384 // (2 << 20)
    assert pieces.row_pieces(call("logits"), counts, 2) == 1
    assert pieces.row_pieces(call("tasks"), counts, 2) == 1
    assert pieces.row_pieces(call("select"), counts, 2) == 4096 * 8192 // (2 << 20)
    for domain in ("batch", "select"):
        of_list = call(domain)
        lists = {place for place, _ in Rows(address=ListOf(0, 64), stride=32).places}
        of_list.reads |= lists  # type: ignore[arg-type]
        assert (pieces.row_pieces(of_list, counts, 2) > 1) == (domain == "select")
        of_list.writes |= lists  # type: ignore[arg-type]
        assert pieces.row_pieces(of_list, counts, 2) == 1


def test_a_piece_of_a_product_has_enough_rows() -> None:
    assert pieces.product_pieces(1, 64, 4096) == 1
    assert pieces.product_pieces(pieces.PRODUCTS, 64, 4096) == 4096 // pieces.LEAST_ROWS
    assert pieces.product_pieces(1, pieces.WRITTEN // 1000, 4096) == 5
    assert pieces.product_pieces(pieces.PRODUCTS, 64, 5) == 1


def test_bands_cover_the_rows() -> None:
    for rows, size in ((0, 4), (1, 1 << 30), (1000, 4096), (BAND, 1)):
        found = list(bands(rows, size))
        assert [n for band in found for n in (band.start, band.stop)] == sorted(
            n for band in found for n in (band.start, band.stop)
        )
        assert sum(band.stop - band.start for band in found) == rows
        assert all((band.stop - band.start) * size <= max(BAND, size) for band in found)
