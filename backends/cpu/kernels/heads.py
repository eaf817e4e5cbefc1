"""Per-head products: each head's slice of a row times the head's matrix, with the kernels of linear.py."""

from __future__ import annotations

from localllm.backends.cpu.arguments import Address, Int64
from localllm.backends.cpu.kernels.common import PlanKernel, kernel, tasks
from localllm.backends.cpu.kernels.linear import Operands, Product, arithmetic, ways
from localllm.backends.cpu.panels import FloatPanel, IntegerPanel
from localllm.backends.cpu.simd import F32, Function, Value
from localllm.backends.cpu.unpack import panel_of


class HeadLinearArguments(Product):
    heads: Int64
    head_bytes: Int64  # stride between the panels of neighbouring heads
    y_head: Int64  # stride between the slices of heads in a row of y, in bytes, at least 64 per panel
    rows: Address  # address of the number of rows


def head_linear(format_name: str) -> PlanKernel[HeadLinearArguments]:
    """Emit y[t][h] = W[h] x[t][h]. A task is a run of panels of one head."""
    panel = panel_of(format_name)

    def body(f: Function, a: HeadLinearArguments, thread: Value, threads: Value) -> None:
        rows, panels, chunk = f.load_int(a.rows), a.panels, a.chunk
        per_head = (panels + chunk - 1) // chunk
        with tasks(f, a.counter, per_head * a.heads, thread, threads) as task:
            head, first = task // per_head, task % per_head * chunk
            x, y = a.x.address + head * _slice_bytes(f, panel, a.blocks), a.y.address + head * a.y_head
            place = Operands(
                a.weights + head * a.head_bytes,
                lambda row: x + row * a.x.stride,
                lambda row: y + row * a.y.stride,
                f.constant(F32, 1.0),
                f.i64(0),
            )
            for wanted, _, part in ways(f, a, panel, thread, rows):
                with f.when(wanted):
                    part(place, rows, first, f.minimum(first + chunk, panels))

    return kernel(f"head_linear_{format_name}", HeadLinearArguments, body)


def _slice_bytes(f: Function, panel: IntegerPanel | FloatPanel, blocks: Value) -> Value:
    """Return the bytes of `blocks` activation blocks in one head's slice of a row."""
    if isinstance(panel, FloatPanel):
        return blocks * (2 if panel.activations is not None and f.isa.bfloat_dot else 4)
    way = arithmetic(panel)
    size: int = panel.block_values // way.VALUES * way.X_BYTES
    return blocks * size
