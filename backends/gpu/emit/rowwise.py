"""Emitters of row-wise operations."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.backends.gpu import formats
from localllm.backends.gpu.kernels import rowwise
from localllm.backends.gpu.kernels.kernel import Launch, by_row, by_value
from localllm.backends.gpu.lowering import Delivery, Lowering
from localllm.backends.gpu.references import Reference, RopeTableOf
from localllm.plan import (
    Activate,
    Add,
    Clamp,
    Concat,
    Embed,
    Experts,
    Glu,
    Norm,
    Rotate,
    Rows,
    Scale,
    SelectRows,
    Slice,
    Softcap,
    Splice,
    Value,
    Xielu,
)

FACTORS = ("FACTOR", "FACTOR1", "FACTOR2", "FACTOR3")  # macros for the factors of an elementwise operation


def elements(
    rows: Rows, operation: str, a: Reference, b: Reference, width: int, to: Delivery, times: int = 1,
    factors: Sequence[float] = (), part: int | None = None,
) -> Launch:  # fmt: skip
    """Emit OPERATION(a, b) elementwise, for `times` rows of `width` values per batch row.

    With `part`, each value of `a` is used for `part` values of `b`.
    """
    named = dict(zip(FACTORS, factors, strict=False))
    kernel = rowwise.Elements(
        OPERATION=operation, WIDTH=width, STRIDE=width, delivered=to.delivered, SLICE=part, **named
    )
    return kernel.launch(by_value(width, rows, times), a=a, b=b, y=to.y, blocks=to.y_blocks)


def embed(low: Lowering, op: Embed) -> None:
    weight, y = op.table, low.make(op.out)
    matrix = low.matrix(weight)
    chunks = op.out.width // 32 if weight.format in formats.QUANTIZED else op.out.width
    kernel = rowwise.EmbedRows(
        format=weight.format, MAX_ROWS=low.limits.rows, K=op.out.width, N=weight.shape[0], Y_STRIDE=y.stride,
        BY_POSITION=op.positions,
    )  # fmt: skip
    low.dispatch("embed", "batch", [kernel.launch(by_value(chunks, "batch", size=kernel.size), w=matrix, y=y)])


def norm(low: Lowering, op: Norm) -> None:
    x, width, rows = low.floats(op.x), op.x.width // op.groups, op.x.rows
    to = low.deliver(op.out) if op.groups == 1 else Delivery(low.make(op.out))
    kernel = rowwise.NormRows(
        SIZE=rowwise.norm_size(width), K=width, X_STRIDE=x.stride, Y_STRIDE=op.out.width, LAYER=op.kind == "layer",
        NORMS=op.kind != "none", EPS=float(op.eps), HAS_BIAS=op.bias is not None,
        GROUP_STRIDE=width if len(op.weight.shape) > 1 else 0, delivered=to.delivered,
    )  # fmt: skip
    weight, bias = low.vector(op.weight), low.vector(op.bias)
    launch = kernel.launch(by_row(op.groups, rows), x=x, weight=weight, bias=bias, y=to.y, blocks=to.y_blocks)
    low.dispatch("norm", rows, [launch])


def rotate(low: Lowering, op: Rotate) -> None:
    x, y, rows = low.floats(op.x), low.make(op.out), op.x.rows
    low.program.ropes.add(op.rope)
    kernel = rowwise.RotateHeads(
        MAX_ROWS=low.rows[rows], WIDTH=op.x.width, STRIDE=x.stride, HEAD=op.head_dim, N_ROT=op.rope.n_rot,
        NEOX=op.rope.style == "neox", AXES=bool(op.rope.axes) or None,
    )  # fmt: skip
    launch = kernel.launch(by_value(op.x.width, rows), x=x, step=low.step(rows), table=RopeTableOf(op.rope), y=y)
    low.dispatch("rotate", rows, [launch])


def select_rows(low: Lowering, op: SelectRows) -> None:
    x, to = low.floats(op.x), low.deliver(op.out)
    kernel = rowwise.Select(MAX_ROWS=low.limits.rows, WIDTH=op.out.width, STRIDE=x.stride, delivered=to.delivered)
    launch = kernel.launch(by_value(op.out.width, "logits"), x=x, y=to.y, blocks=to.y_blocks)
    low.dispatch("select", "logits", [launch])


def splice(low: Lowering, op: Splice) -> None:
    x, media, to, rows = low.floats(op.x), low.floats(op.media), low.deliver(op.out), op.x.rows
    kernel = rowwise.SpliceRows(
        MAX_ROWS=low.rows[rows], WIDTH=op.out.width, STRIDE=x.stride, MEDIA_STRIDE=media.stride, START=op.start,
        ADD=op.add, delivered=to.delivered,
    )  # fmt: skip
    launch = kernel.launch(
        by_value(op.out.width, rows), x=x, media=media, step=low.step(rows), y=to.y, blocks=to.y_blocks
    )
    low.dispatch("splice", rows, [launch])


def slice_columns(low: Lowering, op: Slice) -> None:
    x, to, rows, width = low.floats(op.x), low.deliver(op.out), op.x.rows, op.out.width
    kernel = rowwise.SliceColumns(
        WIDTH=width, X_STRIDE=x.stride, GROUP=op.x.width // op.groups, START=op.start,
        TAKEN=op.stop - op.start, delivered=to.delivered,
    )  # fmt: skip
    low.dispatch("columns", rows, [kernel.launch(by_value(width, rows), x=x, y=to.y, blocks=to.y_blocks)])


def concat(low: Lowering, op: Concat) -> None:
    a, b, to, rows, width = low.floats(op.a), low.floats(op.b), low.deliver(op.out), op.out.rows, op.out.width
    kernel = rowwise.ConcatColumns(
        WIDTH=width, A_STRIDE=a.stride, B_STRIDE=b.stride, OF_A=op.a.width // op.groups,
        OF_B=op.b.width // op.groups, delivered=to.delivered,
    )  # fmt: skip
    low.dispatch("join", rows, [kernel.launch(by_value(width, rows), a=a, b=b, y=to.y, blocks=to.y_blocks)])


# -- elementwise -------------------------------------------------------------------------------------------------------


def _elements(
    low: Lowering, label: str, operation: str, out: Value, a: Value, b: Value, *factors: float, part: int | None = None
) -> None:
    to = low.deliver(out)
    launch = elements(out.rows, operation, low.floats(a), low.floats(b), out.width, to, factors=factors, part=part)
    low.dispatch(label, out.rows, [launch])


def add(low: Lowering, op: Add) -> None:
    _elements(low, "add", "(a) + (b)", op.out, op.a, op.b)


def scale(low: Lowering, op: Scale) -> None:
    _elements(low, "scale", "(a) * FACTOR", op.out, op.x, op.x, float(op.factor))


def activate(low: Lowering, op: Activate) -> None:
    name = "exponential" if op.activation == "exp" else op.activation
    _elements(low, op.activation, f"{name}(a)", op.out, op.x, op.x)


def xielu(low: Lowering, op: Xielu) -> None:
    factors = op.positive, op.negative, op.beta, op.eps
    _elements(low, "xielu", "xielu(a, FACTOR, FACTOR1, FACTOR2, FACTOR3)", op.out, op.x, op.x, *map(float, factors))


def clamp(low: Lowering, op: Clamp) -> None:
    _elements(low, "clamp", "between(a, FACTOR, FACTOR1)", op.out, op.x, op.x, float(op.low), float(op.high))


def softcap(low: Lowering, op: Softcap) -> None:
    _elements(low, "softcap", "FACTOR * hyperbolic_tangent((a) / FACTOR)", op.out, op.x, op.x, float(op.cap))


def glu(low: Lowering, op: Glu) -> None:
    part = op.up.width // op.gate.width if op.gate.width < op.up.width else None
    _elements(low, "glu", glu_expression(op), op.out, op.gate, op.up, part=part)


def glu_expression(op: Glu | Experts) -> str:
    """Return activation(a) * b as an expression in kernel code."""
    match op.activation:
        case "swiglu_oai":
            return "swiglu_oai(a, b)"
        case "swiglu_clamp" | "silu_clamp" | "situ":
            return f"{op.activation}(a, b, {op.limit:.9e}f)"
        case "gelu_alone":
            return "gelu(a)"
    return f"{op.activation}(a) * (b)"
