"""Matrices in panels, except products: file rows to panels, and one row back to floats for the embedding."""

from __future__ import annotations

from enum import IntEnum

from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels.common import Arguments, Step, kernel, own_rows
from localllm.backends.cpu.panels import Block, FloatPanel
from localllm.backends.cpu.simd import I8, I16, I32, LANES, Function, Value, vector
from localllm.backends.cpu.unpack import panel_of


class RepackArg(IntEnum):
    SOURCE = 0  # file rows
    ROW_BYTES = 1
    ROWS = 2
    TARGET = 3  # first panel; the rows start at its lane 0
    BLOCKS = 4
    PANEL_BYTES = 5
    SIZE = 8


def repack(format_name: str) -> Kernel:
    """Convert file rows to panels. Lanes of rows that do not exist are unchanged (zero)."""
    panel = panel_of(format_name)
    if isinstance(panel, FloatPanel):
        fields: tuple[tuple[int, int], ...] = ((panel.value_bytes, 1),)
        rearrange, rearranged, together = None, -1, panel.together
    else:
        fields, rearrange, rearranged, together = panel.fields, panel.repack_word, panel.repack_field, 1
    block_bytes = sum(size * count for size, count in fields)
    types = {1: I8, 2: I16, 4: I32}

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        rows, blocks = a.i64(RepackArg.ROWS), a.i64(RepackArg.BLOCKS)
        # Blocks outside, lanes inside: the writes of one panel block stay in a few cache lines.
        with f.loop(0, (rows + LANES - 1) // LANES) as p, f.loop(0, blocks) as block:
            first = p * LANES
            target = a.pointer(RepackArg.TARGET) + p * a.i64(RepackArg.PANEL_BYTES)
            if isinstance(panel, FloatPanel):
                value_target = panel.at(target, block, f.i64(0))
                here = Block(value_target, value_target, {0: 0})
            else:
                here = panel.block(target, block, blocks)
            with f.loop(0, f.minimum(rows - first, LANES)) as lane:
                source = a.pointer(RepackArg.SOURCE) + (
                    (first + lane) * a.i64(RepackArg.ROW_BYTES) + block * block_bytes
                )
                at = 0
                for number, (size, count) in enumerate(fields):
                    for _ in range(count):
                        value = f.load(source + at, types[size])
                        if number == rearranged and rearrange is not None:
                            value = rearrange(f, value)
                        f.store(here.at(at, size) + lane * (size * together), value)
                        at += size

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
    panel = panel_of(format_name)

    def body(f: Function, a: Arguments, thread: Value, threads: Value) -> None:
        step = a.pointer(EmbedArg.STEP)
        with own_rows(f, f.load_int(step, Step.ROWS), thread, threads) as row:
            token = f.load_i32(f.pointer(f.load_int(step, Step.TOKENS)), row)
            lane = token % LANES
            source = a.pointer(EmbedArg.WEIGHTS) + (token // LANES) * a.i64(EmbedArg.PANEL_BYTES)
            y = a.pointer(EmbedArg.Y) + row * a.i64(EmbedArg.Y_STRIDE)
            with f.loop(0, a.i64(EmbedArg.BLOCKS)) as block:
                if isinstance(panel, FloatPanel):
                    f.store(y + block * 4, panel.load(f, panel.at(source, block, lane), 1))
                else:
                    # The whole block is unpacked for one of its 16 rows, but only once per token, not per layer.
                    here = panel.block(source, block, a.i64(EmbedArg.BLOCKS))
                    out = y + block * (4 * panel.block_values)
                    scales = [
                        [None if s is None else f.splat(f.lane_at(s, lane), 4) for s in panel.scales(f, here, group)]
                        for group in range(panel.groups)
                    ]
                    for group, word, weights in panel.steps(f, here):
                        four = f.bits(f.lane_at(f.bits(weights, vector(I32)), lane), vector(I8, 4))
                        scale, minimum = scales[group]
                        assert scale is not None
                        value = f.to_float(f.widen(four, I32) - panel.offset) * scale
                        f.store(
                            out + 4 * (group * panel.group + 4 * word), value if minimum is None else value - minimum
                        )

    return kernel(f"embed_{format_name}", body)
