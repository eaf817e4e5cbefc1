"""y = x W^T out of weight panels: mat-vec for one row, register tiles for more, repacking, and embedding rows.

Lane = output row: every output is one chain of fused multiply-adds over its blocks in order of k, whatever the tile,
so a row's result does not depend on how many rows came with it. Tasks are runs of panels taken from a counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from backends.cpu.dot import broadcast4
from backends.cpu.jit import Kernel
from backends.cpu.kernels.common import X_BLOCK, X_OFFSET, X_SCALE, Arguments, Step, f32x16, kernel, own_rows, tasks
from backends.cpu.panels import FLOAT_PANELS, INTEGER_PANELS, FloatPanel, IntegerPanel, half_bits
from backends.cpu.simd import F32, I16, I32, LANES, Function, Value, Variable, vector


class LinearArg(IntEnum):
    WEIGHTS = 0
    BLOCKS = 1  # along K: blocks of an integer format, values of a float format
    PANELS = 2  # even
    PANEL_BYTES = 3
    CHUNK = 4  # panels of one task, even
    X = 5
    X_STRIDE = 6  # bytes
    Y = 7
    Y_STRIDE = 8  # bytes; a row holds 16 * PANELS floats
    BIAS = 9  # float32 address, 0 for none
    RESIDUAL = 10  # added last; may be y itself; 0 for none
    RESIDUAL_STRIDE = 11
    SCALE = 12  # float32
    ROWS = 13  # address of the row count
    COUNTER = 14
    SIZE = 16


def linear(format_name: str) -> Kernel:
    """y[t] = scale * (W x[t]) + bias + residual[t]; integer formats read activation blocks, float formats float32."""
    panel = INTEGER_PANELS.get(format_name) or FLOAT_PANELS[format_name]

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        tile_rows, tile_panels = f.isa.int_tile if isinstance(panel, IntegerPanel) else f.isa.float_tile
        rows = f.load_int(a.pointer(LinearArg.ROWS))
        panels, chunk = a.i64(LinearArg.PANELS), a.i64(LinearArg.CHUNK)
        with tasks(f, a.pointer(LinearArg.COUNTER), (panels + chunk - 1) // chunk) as task:
            first = task * chunk
            last = f.minimum(first + chunk, panels)
            done = f.var(f.i64(0))
            sizes = [n for n in (tile_rows, 4, 2, 1) if n <= tile_rows]
            for size in dict.fromkeys(sizes):
                step = tile_panels if size > 1 else min(2, tile_panels)
                with f.while_(lambda size=size: done.get() + size <= rows):
                    row = done.get()
                    with f.loop(first, last, step) as p:  # the tile's activations stay in L1, the chunk's panels in L2
                        _tile(f, a, panel, p, row, size, step)
                    done.set(row + size)

    return kernel(f"linear_{format_name}", body)


def _tile(
    f: Function, a: Arguments, panel: IntegerPanel | FloatPanel, p: Value, row: Value, rows: int, panels: int
) -> None:
    """rows x (16 * panels) outputs, held in registers along the whole of K."""
    panel_bytes = a.i64(LinearArg.PANEL_BYTES)
    w = [a.pointer(LinearArg.WEIGHTS) + (p + i) * panel_bytes for i in range(panels)]
    x = [a.pointer(LinearArg.X) + (row + t) * a.i64(LinearArg.X_STRIDE) for t in range(rows)]
    sums = [[f.var(f.zeros(f32x16)) for _ in range(panels)] for _ in range(rows)]
    with f.loop(0, a.i64(LinearArg.BLOCKS)) as block:
        if isinstance(panel, IntegerPanel):
            _integer_block(f, panel, [v + block * panel.block_bytes for v in w], [v + block * X_BLOCK for v in x], sums)
        else:
            here = [panel.load(f, v + block * (LANES * panel.value_bytes), LANES) for v in w]
            for t in range(rows):
                value = f.broadcast(x[t] + block * 4, F32)
                for i in range(panels):
                    sums[t][i].set(f.fma(here[i], value, sums[t][i].get()))
    scale = f.splat(a.f32(LinearArg.SCALE))
    bias, residual = a.i64(LinearArg.BIAS), a.i64(LinearArg.RESIDUAL)
    for t in range(rows):
        for i in range(panels):
            at = (p + i) * (4 * LANES)
            y = f.var(sums[t][i].get() * scale)
            with f.when(bias.differs(0)):
                y.set(y.get() + f.load(f.pointer(bias) + at, f32x16))
            with f.when(residual.differs(0)):
                other = f.pointer(residual) + ((row + t) * a.i64(LinearArg.RESIDUAL_STRIDE) + at)
                y.set(y.get() + f.load(other, f32x16))
            f.store(a.pointer(LinearArg.Y) + ((row + t) * a.i64(LinearArg.Y_STRIDE) + at), y.get())


def _integer_block(
    f: Function, panel: IntegerPanel, w: Sequence[Value], x: Sequence[Value], sums: Sequence[Sequence[Variable]]
) -> None:
    """sum += float(integer dot product of a block) * (weight scale * activation scale)."""
    offset = panel.offset_always or f.isa.biased_needs_offset
    integers: list[list[Value]] = []
    for row in x:
        start = f.broadcast(row + X_OFFSET[panel.offset], I32) if offset else f.zeros(vector(I32))
        integers.append([start] * len(w))
    for step in zip(*(panel.steps(f, block) for block in w), strict=True):
        for t, row in enumerate(x):
            values = broadcast4(f, row + step[0][1])
            for i, (weights, _, dot) in enumerate(step):
                integers[t][i] = dot(f, integers[t][i], weights, values)
    scales = [panel.scale(f, block) for block in w]
    for t, row in enumerate(x):
        x_scale = f.broadcast(row + X_SCALE, F32)
        for i, scale in enumerate(scales):
            sums[t][i].set(f.fma(f.to_float(integers[t][i]), scale * x_scale, sums[t][i].get()))


class RepackArg(IntEnum):
    SOURCE = 0  # file rows
    ROW_BYTES = 1
    ROWS = 2
    TARGET = 3  # first panel; the rows start at its lane 0
    BLOCKS = 4
    PANEL_BYTES = 5
    SIZE = 8


def repack(format_name: str) -> Kernel:
    """File rows to panels. Lanes of rows that do not exist stay as they are (zero)."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        blocks, panel_bytes = a.i64(RepackArg.BLOCKS), a.i64(RepackArg.PANEL_BYTES)
        integer = INTEGER_PANELS.get(format_name)
        rows = a.i64(RepackArg.ROWS)
        # Blocks outside, lanes inside: the writes of one panel block stay in a few cache lines.
        with f.loop(0, (rows + LANES - 1) // LANES) as p, f.loop(0, blocks) as block:
            first = p * LANES
            with f.loop(0, f.minimum(rows - first, LANES)) as lane:
                source = a.pointer(RepackArg.SOURCE) + (first + lane) * a.i64(RepackArg.ROW_BYTES)
                target = a.pointer(RepackArg.TARGET) + p * panel_bytes
                if integer is not None:
                    source = source + block * integer.file_block_bytes
                    target = target + block * integer.block_bytes
                    half_bits(f, source, target + lane * 2)
                    integer.repack_block(f, source, target + lane * 4)
                else:
                    size = FLOAT_PANELS[format_name].value_bytes
                    type_ = I32 if size == 4 else I16
                    value = f.load(source + block * size, type_)
                    f.store(target + (block * LANES + lane) * size, value)

    return kernel(f"repack_{format_name}", body)


class EmbedArg(IntEnum):
    STEP = 0
    WEIGHTS = 1
    BLOCKS = 2
    PANEL_BYTES = 3
    Y = 4
    Y_STRIDE = 5
    SIZE = 8


def embed(format_name: str) -> Kernel:
    """y[t] = row tokens[t] of a matrix in panels, as float32: the file's numbers to the bit."""

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        step = a.pointer(EmbedArg.STEP)
        with own_rows(f, f.load_int(step, Step.ROWS), thread, threads) as row:
            token = f.load_i32(f.pointer(f.load_int(step, Step.TOKENS)), row)
            lane = token % LANES
            source = a.pointer(EmbedArg.WEIGHTS) + (token // LANES) * a.i64(EmbedArg.PANEL_BYTES)
            y = a.pointer(EmbedArg.Y) + row * a.i64(EmbedArg.Y_STRIDE)
            integer = INTEGER_PANELS.get(format_name)
            with f.loop(0, a.i64(EmbedArg.BLOCKS)) as block:
                if integer is None:
                    panel = FLOAT_PANELS[format_name]
                    at = source + (block * LANES + lane) * panel.value_bytes
                    f.store(y + block * 4, panel.load(f, at, 1))
                else:
                    at = source + block * integer.block_bytes
                    scale = f.splat(f.lane(f.load_half(at + lane * 2, 1), 0), 4)
                    for k, values in integer.read_row(f, at, lane):
                        f.store(y + (block * integer.block_values + k) * 4, f.to_float(values) * scale)

    return kernel(f"embed_{format_name}", body)
