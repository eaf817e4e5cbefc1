"""Operations that work row by row."""

from __future__ import annotations

from localllm.backends.allocation import Buffer
from localllm.backends.gpu import formats
from localllm.backends.gpu.kernels import rowwise
from localllm.backends.gpu.kernels.kernel import Launch
from localllm.backends.gpu.lowering import Delivery, Lowering
from localllm.backends.gpu.references import RopeTableOf
from localllm.plan import (
    Activate,
    Add,
    Clamp,
    Embed,
    Glu,
    Norm,
    Rotate,
    Rows,
    Scale,
    SelectRows,
    Softcap,
    Value,
)


def elements(
    rows: Rows, operation: str, a: Buffer, b: Buffer, width: int, to: Delivery, times: int = 1,
    factor: float | None = None, gate_stride: int | None = None,
) -> Launch:  # fmt: skip
    """Emit OPERATION(a, b) elementwise, for `times` rows of `width` numbers per row of the batch."""
    kernel = rowwise.Elements(
        OPERATION=operation, WIDTH=width, STRIDE=width, delivered=to.delivered, FACTOR=factor, GATE_STRIDE=gate_stride
    )
    buffers = rowwise.ElementsBuffers(a=a, b=b, y=to.y, blocks=to.y_blocks)
    return kernel.launch((-(-width // 128), (rows, 1, times), 1), buffers)


def embed(low: Lowering, op: Embed) -> None:
    weight, y = op.table, low.make(op.out)
    matrix = low.matrix(weight)
    chunks = op.out.width // 32 if weight.format in formats.QUANTIZED else op.out.width
    kernel = rowwise.EmbedRows(
        format=weight.format, MAX_ROWS=low.limits.rows, K=op.out.width, N=weight.shape[0], Y_STRIDE=y.stride
    )
    grid = (-(-chunks // 64), ("batch", 1, 1), 1)
    low.dispatch("embed", "batch", [kernel.launch(grid, rowwise.EmbedRowsBuffers(w=matrix, y=y))])


def norm(low: Lowering, op: Norm) -> None:
    x, width, rows = low.floats(op.x), op.x.width // op.groups, op.x.rows
    to = low.deliver(op.out) if op.groups == 1 else Delivery(low.make(op.out))
    kernel = rowwise.NormRows(
        SIZE=rowwise.norm_size(width), K=width, X_STRIDE=x.stride, Y_STRIDE=op.out.width, LAYER=op.kind == "layer",
        EPS=float(op.eps), HAS_BIAS=op.bias is not None, GROUP_STRIDE=width if len(op.weight.shape) > 1 else 0,
        delivered=to.delivered,
    )  # fmt: skip
    weight, bias = low.vector(op.weight), low.vector(op.bias)
    buffers = rowwise.NormRowsBuffers(x=x, weight=weight, bias=bias, y=to.y, blocks=to.y_blocks)
    low.dispatch("norm", rows, [kernel.launch((op.groups, (rows, 1, 1), 1), buffers)])


def rotate(low: Lowering, op: Rotate) -> None:
    x, y = low.floats(op.x), low.make(op.out)
    low.program.ropes.add(op.rope)
    kernel = rowwise.RotateHeads(
        MAX_ROWS=low.limits.rows, WIDTH=op.x.width, STRIDE=x.stride, HEAD=op.head_dim, N_ROT=op.rope.n_rot,
        NEOX=op.rope.style == "neox",
    )  # fmt: skip
    buffers = rowwise.RotateHeadsBuffers(x=x, table=RopeTableOf(op.rope), y=y)
    low.dispatch("rotate", "batch", [kernel.launch((-(-op.x.width // 128), ("batch", 1, 1), 1), buffers)])


def select(low: Lowering, op: SelectRows) -> None:
    x, to = low.floats(op.x), low.deliver(op.out)
    kernel = rowwise.Select(MAX_ROWS=low.limits.rows, WIDTH=op.out.width, STRIDE=x.stride, delivered=to.delivered)
    buffers = rowwise.SelectBuffers(x=x, y=to.y, blocks=to.y_blocks)
    low.dispatch("select", "logits", [kernel.launch((-(-op.out.width // 128), ("logits", 1, 1), 1), buffers)])


# -- number by number --------------------------------------------------------------------------------------------------


def _elements(
    low: Lowering, label: str, operation: str, out: Value, a: Value, b: Value, factor: float | None = None,
    gate_stride: int | None = None,
) -> None:  # fmt: skip
    to = low.deliver(out)
    launch = elements(
        out.rows, operation, low.floats(a), low.floats(b), out.width, to, factor=factor, gate_stride=gate_stride
    )
    low.dispatch(label, out.rows, [launch])


def add(low: Lowering, op: Add) -> None:
    _elements(low, "add", "(a) + (b)", op.out, op.a, op.b)


def scale(low: Lowering, op: Scale) -> None:
    _elements(low, "scale", "(a) * FACTOR", op.out, op.x, op.x, float(op.factor))


def activate(low: Lowering, op: Activate) -> None:
    _elements(low, op.activation, f"{op.activation}(a)", op.out, op.x, op.x)


def clamp(low: Lowering, op: Clamp) -> None:
    within = "(a) > FACTOR ? FACTOR : (a) < -FACTOR ? -FACTOR : (a)"
    _elements(low, "clamp", within, op.out, op.x, op.x, float(op.bound))


def softcap(low: Lowering, op: Softcap) -> None:
    _elements(low, "softcap", "FACTOR * hyperbolic_tangent((a) / FACTOR)", op.out, op.x, op.x, float(op.cap))


def glu(low: Lowering, op: Glu) -> None:
    one_a_row = 1 if op.gate.width == 1 and op.up.width > 1 else None
    _elements(low, "glu", glu_expression(op.activation), op.out, op.gate, op.up, gate_stride=one_a_row)


def glu_expression(activation: str) -> str:
    return "swiglu_oai(a, b)" if activation == "swiglu_oai" else f"{activation}(a) * (b)"
