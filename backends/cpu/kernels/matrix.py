"""Matrices in panels: `repack` converts rows of the GGUF to panels, `embed` dequantizes single rows."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64, Output, Struct, Target
from localllm.backends.cpu.kernels.common import PlanKernel, Step, kernel, own_rows
from localllm.backends.cpu.panels import Block, FloatPanel, stored_elements
from localllm.backends.cpu.simd import I8, I32, LANES, Function, Value, vector
from localllm.backends.cpu.unpack import panel_of


class RepackArguments(Struct):
    source: Address  # rows in GGUF layout
    row_bytes: Int64
    rows: Int64
    target: Target  # first panel; the first row goes to lane 0
    blocks: Int64
    panel_bytes: Int64


def repack(format_name: str) -> PlanKernel[RepackArguments]:
    """Convert rows in GGUF layout to panels. Lanes without a row stay zero."""
    panel = panel_of(format_name)
    if isinstance(panel, FloatPanel):
        fields: tuple[tuple[int, int], ...] = ((panel.value_bytes, 1),)
        conversion, together = None, panel.together
    else:
        fields, conversion, together = panel.fields, panel.conversion, 1
    block_bytes = sum(size * count for size, count in fields) if conversion is None else conversion.block_bytes

    def body(f: Function, a: RepackArguments, thread: Value, threads: Value) -> None:
        rows, blocks = a.rows, a.blocks
        # Blocks in the outer loop, lanes in the inner: the writes of one panel block stay in a few cache lines.
        with f.loop(0, (rows + LANES - 1) // LANES) as p, f.loop(0, blocks) as block:
            first = p * LANES
            target = a.target + p * a.panel_bytes
            if isinstance(panel, FloatPanel):
                value_target = panel.at(target, block, f.i64(0))
                here = Block(value_target, value_target, {0: 0})
            else:
                here = panel.block(target, block, blocks)
            with f.loop(0, f.minimum(rows - first, LANES)) as lane:
                source = a.source + ((first + lane) * a.row_bytes + block * block_bytes)
                found = conversion.elements(f, source) if conversion else stored_elements(f, fields, source)
                at = 0
                for size, count in fields:
                    for _ in range(count):
                        f.store(here.at(at, size) + lane * (size * together), next(found))
                        at += size

    return kernel(f"repack_{format_name}", RepackArguments, body)


def unpack_row(
    f: Function, format_name: str, weights: Value, blocks: Value, panel_bytes: Value, number: Value, y: Value
) -> None:
    """Dequantize one row of a matrix in panels to y as float32, bit-equal to the format's definition."""
    panel, lane = panel_of(format_name), number % LANES
    source = weights + (number // LANES) * panel_bytes
    with f.loop(0, blocks) as block:
        if isinstance(panel, FloatPanel):
            f.store(y + block * 4, panel.load(f, panel.at(source, block, lane), 1))
        else:
            # This unpacks a whole block for only one of its 16 rows, but once per token, not once per layer.
            here = panel.block(source, block, blocks)
            out = y + block * (4 * panel.block_values)
            scales = [
                [None if s is None else f.splat(f.lane_at(s, lane), 4) for s in panel.scales(f, here, group)]
                for group in range(panel.groups)
            ]
            for group, word, values in panel.steps(f, here):
                four = f.bits(f.lane_at(f.bits(values, vector(I32)), lane), vector(I8, 4))
                scale, minimum = scales[group]
                assert scale is not None
                value = f.to_float(f.widen(four, I32) - panel.offset) * scale
                f.store(out + 4 * (group * panel.group + 4 * word), value if minimum is None else value - minimum)


class EmbedArguments(Struct):
    step: Address
    weights: Address
    blocks: Int64
    panel_bytes: Int64
    last: Int64  # index of the last row
    y: Output


def embed(format_name: str, positions: bool = False) -> PlanKernel[EmbedArguments]:
    """Emit y[t] = row max(tokens[t], 0) of a matrix in panels, as float32, bit-equal to the format's definition.

    With `positions`, the index is the row's position instead, clamped to the last row.
    """

    def body(f: Function, a: EmbedArguments, thread: Value, threads: Value) -> None:
        step = Step.at(a.step)
        with own_rows(f, step.rows, thread, threads) as row:
            token = f.load_i32(step.positions if positions else step.tokens, row)
            token = f.minimum(token, a.last) if positions else f.select(token > 0, token, f.i64(0))
            unpack_row(f, format_name, a.weights, a.blocks, a.panel_bytes, token, a.y.row(row))

    return kernel(f"embed_{format_name}{'_positions' * positions}", EmbedArguments, body)
