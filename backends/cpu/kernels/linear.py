"""y = x W^T from weight panels.

With few rows (decode) a thread multiplies the packed bytes of a panel. With more rows (prefill, verify) it first
unpacks a few panels to bytes and float scales in its L2 cache, then multiplies tiles of rows by them in registers. All
formats share this tile kernel, except the formats that use `wide` on AVX2. Each lane is an output row. Every output is
one chain of fused multiply-adds over its groups in order of k, for any number of rows in the batch, so results are
bitwise independent of the batch size. A task is a run of panels; threads take tasks from a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from localllm.backends.cpu import dot
from localllm.backends.cpu.arguments import (
    Address,
    AddressOrZero,
    Float32,
    Int64,
    Output,
    Rows,
    RowsOrNone,
    Struct,
)  # fmt: skip
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.kernels import blocks, super_blocks, wide
from localllm.backends.cpu.kernels.common import PlanKernel, f32x16, kernel, lines_ahead, read_ahead, tasks
from localllm.backends.cpu.panels import FloatPanel, IntegerPanel
from localllm.backends.cpu.simd import LANES, Function, Value, Variable
from localllm.backends.cpu.unpack import panel_of


class Product(Struct):
    """Arguments that dense products and products with experts' matrices share."""

    weights: Address
    blocks: Int64  # blocks along K of a quantized format, or values along K of a float format
    panels: Int64  # even number of panels
    panel_bytes: Int64
    chunk: Int64  # panels per task: even, or 1 for a float format
    x: Rows
    y: Output  # 16 * panels floats per row
    bias: AddressOrZero  # float32
    counter: Address
    scratch: Rows  # scratch for the unpacked panels of a task, one row per thread


class LinearArguments(Product):
    tile_chunk: Int64  # panels per task when unpacking
    residual: RowsOrNone  # added last; may be the same memory as y
    scale: Float32
    rows: Address  # address of the number of rows


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of a product.

    `x`, `y` and `residual` map row numbers to addresses, because the rows of experts are scattered.
    """

    weights: Value  # the first panel
    x: Callable[[Value], Value]
    y: Callable[[Value], Value]
    scale: Value  # float32
    bias: Value  # int64: address of float32 values, or 0
    residual: Callable[[Value], Value] | None = None
    residual_given: Value | None = None  # whether there is a residual


def linear(format_name: str) -> PlanKernel[LinearArguments]:
    """Emit y[t] = scale * (W x[t]) + bias + residual[t].

    Quantized formats read activation blocks. Float formats read float32 or BF16.
    """
    panel = panel_of(format_name)

    def body(f: Function, a: LinearArguments, thread: Value, threads: Value) -> None:
        weights, scale, bias = a.weights, a.scale, a.bias
        place = Operands(weights, a.x.row, a.y.row, scale, bias, a.residual.row, a.residual.given)
        rows = f.load_int(a.rows)
        for wanted, unpacks, part in ways(f, a, panel, thread, rows):
            with f.when(wanted):
                panels, chunk = a.panels, a.tile_chunk if unpacks else a.chunk
                with tasks(f, a.counter, (panels + chunk - 1) // chunk, thread, threads) as task:
                    first = task * chunk
                    part(place, rows, first, f.minimum(first + chunk, panels))

    return kernel(f"linear_{format_name}", LinearArguments, body)


Part = Callable[[Operands, Value, Value, Value], None]  # arguments: operands, rows, first panel, end of panels


def ways(
    f: Function, a: Product, panel: IntegerPanel | FloatPanel, thread: Value, rows: Value
) -> list[tuple[Value, bool, Part]]:
    """Return (condition, whether it unpacks, code) for each method of multiplication. Exactly one condition holds."""
    if isinstance(panel, FloatPanel):

        def floats(place: Operands, count: Value, first: Value, last: Value) -> None:
            _float_rows(f, a, panel, place, count, first, last)

        return [(rows > 0, False, floats)]

    def direct(place: Operands, count: Value, first: Value, last: Value) -> None:
        _direct_rows(f, a, panel, place, count, first, last)

    def tiled(place: Operands, count: Value, first: Value, last: Value) -> None:
        _tiled_rows(f, a, panel, place, a.scratch.row(thread), count, first, last)

    most = _most_direct_rows(f.isa, panel)
    return [(rows <= most, False, direct), (rows > most, True, tiled)]


def _for_rows(f: Function, rows: Value, sizes: Sequence[int], part: object) -> None:
    """Call part(first row, size) for runs of rows, using the largest sizes first."""
    assert callable(part)
    done = f.var(f.i64(0))
    for size in dict.fromkeys(sizes):
        with f.while_(lambda size=size: done.get() + size <= rows):
            row = done.get()
            part(row, size)
            done.set(row + size)


def _for_even_rows(f: Function, rows: Value, most: int, part: Callable[[Value, int], None]) -> None:
    """Call part(first row, size) for as few runs of at most `most` rows as possible, of about the same size."""
    done = f.var(f.i64(0))
    with f.while_(lambda: done.get() < rows):
        row = done.get()
        left = rows - row
        runs = (left + (most - 1)) // most
        size = (left + runs - 1) // runs
        for each in range(1, most + 1):
            with f.when(size.equals(each)):
                part(row, each)
        done.set(row + size)


def _finish(f: Function, place: Operands, p: Value, row: Value, sums: Sequence[Sequence[Variable]]) -> None:
    """Apply scale, bias and residual, and store a tile's outputs: panels from p on, rows from `row` on."""
    scale = f.splat(place.scale)
    for t, of_row in enumerate(sums):
        target = place.y(row + t)
        for i, total in enumerate(of_row):
            at = (p + i) * (4 * LANES)
            y = f.var(total.get() * scale)
            with f.when(place.bias.differs(0)):
                y.set(y.get() + f.load(f.pointer(place.bias) + at, f32x16))
            if place.residual is not None and place.residual_given is not None:
                with f.when(place.residual_given):
                    y.set(y.get() + f.load(place.residual(row + t) + at, f32x16))
            f.store(target + at, y.get())


def _sums(f: Function, rows: int, panels: int) -> list[list[Variable]]:
    return [[f.var(f.zeros(f32x16)) for _ in range(panels)] for _ in range(rows)]


# -- float formats ---------------------------------------------------------------------------------------------------


def _float_rows(
    f: Function, a: Product, panel: FloatPanel, place: Operands, rows: Value, first: Value, last: Value
) -> None:
    pairs = panel.activations is not None
    tile_rows, tile_panels = f.isa.bfloat_tile if pairs else f.isa.float_tile

    def multiply(w: Value, x: Value, total: Value) -> Value:
        return dot.bfloats(f, total, w, x) if pairs and f.isa.bfloat_dot else f.fma(w, x, total)

    def tile(row: Value, size: int) -> None:
        panels = tile_panels if size > 1 else 2
        rest = (last - first) % panels
        with f.loop(first, last - rest, panels) as p:
            side_by_side(row, size, p, panels)
        if panels > 1:
            with f.loop(last - rest, last) as p:
                side_by_side(row, size, p, 1)

    def side_by_side(row: Value, size: int, p: Value, panels: int) -> None:
        w = [place.weights + (p + i) * a.panel_bytes for i in range(panels)]
        x, sums = [place.x(row + t) for t in range(size)], _sums(f, size, panels)
        with f.loop(0, (a.blocks + (panel.together - 1)) // panel.together) as step:
            at = [v + step * panel.step_bytes for v in w]
            read_ahead(f, lines_ahead(f, at))
            operands = list(zip(*[panel.operands(f, v) for v in at], strict=True))
            for t in range(size):
                for n, here in enumerate(operands):
                    value = f.broadcast(x[t] + (step * len(operands) + n) * 4, here[0].type.element)
                    for i in range(panels):
                        sums[t][i].set(multiply(here[i], value, sums[t][i].get()))
        _finish(f, place, p, row, sums)

    _for_rows(f, rows, [n for n in (tile_rows, 4, 2, 1) if n <= tile_rows], tile)


# -- quantized formats, few rows -------------------------------------------------------------------------------------


def _most_direct_rows(isa: Isa, panel: IntegerPanel) -> int:
    """Return the number of rows up to which products use packed bytes."""
    return panel.direct_rows[isa.registers < 32] or isa.direct_rows


def rows_per_pass(isa: Isa, panel: IntegerPanel) -> int:
    """Return the maximum rows that share one read of the packed bytes."""
    most: int = arithmetic(panel).rows_per_call(isa)
    return min(most, _most_direct_rows(isa, panel))


def arithmetic(panel: IntegerPanel) -> ModuleType:
    """Return the module that multiplies blocks of this format."""
    return blocks if panel.super_scales is None else super_blocks


def direct_pass(
    f: Function, a: Product, panel: IntegerPanel, place: Operands, row: Value, size: int, first: Value, last: Value
) -> None:
    """Multiply the packed bytes of panels `first` to `last` by `size` rows."""
    way = arithmetic(panel)
    with f.loop(first, last) as p:
        w = place.weights + p * a.panel_bytes
        x, sums = [place.x(row + t) for t in range(size)], _sums(f, size, 1)
        x_bytes = panel.block_values // way.VALUES * way.X_BYTES
        with f.loop(0, a.blocks) as block:
            here = panel.block(w, block, a.blocks)
            way.direct_block(f, panel, here, [v + block * x_bytes for v in x], [s[0] for s in sums])
        _finish(f, place, p, row, sums)


def _direct_rows(
    f: Function, a: Product, panel: IntegerPanel, place: Operands, rows: Value, first: Value, last: Value
) -> None:
    most = rows_per_pass(f.isa, panel)
    _for_even_rows(f, rows, most, lambda row, size: direct_pass(f, a, panel, place, row, size, first, last))


# -- quantized formats, many rows ------------------------------------------------------------------------------------


def _tiled_rows(
    f: Function,
    a: Product,
    panel: IntegerPanel,
    place: Operands,
    scratch: Value,
    rows: Value,
    first: Value,
    last: Value,
) -> None:
    way = arithmetic(panel)
    in_pairs = wide.used(f.isa, panel)
    unpacking = wide if in_pairs else way
    per_block, size_ = panel.block_values // way.VALUES, unpacking.tile_bytes(f.isa, panel)
    parts = a.blocks * per_block
    unpacked = parts * size_
    with f.loop(first, last) as p:
        source = place.weights + p * a.panel_bytes
        target = scratch + (p - first) * unpacked
        with f.loop(0, a.blocks) as block:
            at = block * (per_block * size_)
            unpacking.unpack(f, panel, panel.block(source, block, a.blocks), target + at)
    if in_pairs:
        _wide_tiles(f, panel, place, rows, first, last, scratch, parts)
        return
    tile_rows, tile_panels = f.isa.int_tile if panel.super_scales is None else f.isa.super_tile

    def tile(row: Value, size: int) -> None:
        with f.loop(first, last, tile_panels) as p:
            w = [scratch + (p - first + i) * unpacked for i in range(tile_panels)]
            x, sums = [place.x(row + t) for t in range(size)], _sums(f, size, tile_panels)
            with f.loop(0, parts) as part:
                way.tile(f, panel, [v + part * size_ for v in w], [v + part * way.X_BYTES for v in x], sums)
            _finish(f, place, p, row, sums)

    _for_rows(f, rows, [n for n in (tile_rows, 4, 2, 1) if n <= tile_rows], tile)


def _wide_tiles(
    f: Function,
    panel: IntegerPanel,
    place: Operands,
    rows: Value,
    first: Value,
    last: Value,
    unpacked: Value,
    parts: Value,
) -> None:
    """Multiply tiles by the panels that `wide` unpacked. A tile's widened activations follow the panels in memory."""
    panel_bytes = parts * wide.tile_bytes(f.isa, panel)
    widened = unpacked + (last - first) * panel_bytes
    waiting = f.buffer(wide.SUMS_BYTES)

    def tile(row: Value, size: int) -> None:
        x = [place.x(row + t) for t in range(size)]
        wide.widen(f, panel, x, parts, widened)
        with f.loop(first, last) as p:
            for t in range(size):
                f.store(waiting + 64 * t, f.zeros(f32x16))
            wide.tile(f, panel, unpacked + (p - first) * panel_bytes, x, widened, parts, waiting)
            _finish(f, place, p, row, [[f.var(f.load(waiting + 64 * t, f32x16))] for t in range(size)])

    _for_rows(f, rows, [wide.ROWS, 2, 1], tile)
