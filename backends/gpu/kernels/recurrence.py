"""Declarations of the kernels of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.gpu.kernels.kernel import Buffers, FloatIn, FloatOut, IntIn, Kernel, Macros, Shape
from localllm.backends.gpu.references import Fixed
from localllm.plan import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Macros):
    """Offsets in the step buffer: of the slots of a store's rows, and of the stride of its block tables."""

    MAX_ROWS: Shape
    BLOCK_TOKENS: int = BLOCK
    SLOTS_AT: int
    TABLE_STRIDE_AT: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolveBuffers(Buffers):
    x: FloatIn
    step: IntIn = Fixed.STEP
    tables: IntIn
    weight: FloatIn
    bias: FloatIn
    rows: FloatOut
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolve(Kernel[ConvolveBuffers]):
    name, parts, flag = "convolve", "recurrence", "CONVOLVE"
    stored: Stored
    WIDTH: Shape
    SIZE: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    HAS_BIAS: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendPooledBuffers(Buffers):
    x: FloatIn
    scores: FloatIn
    step: IntIn = Fixed.STEP
    rows: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendPooled(Kernel[AppendPooledBuffers]):
    name, parts, flag = "append_pooled", "recurrence", "APPEND_POOLED"
    stored: Stored
    WIDTH: Shape  # width of x
    X_STRIDE: Shape
    S_STRIDE: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRowsBuffers(Buffers):
    step: IntIn = Fixed.STEP
    tables: IntIn
    bias: FloatIn
    rows: FloatIn
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRows(Kernel[PoolRowsBuffers]):
    name, parts, flag = "pool_rows", "recurrence", "POOL"
    stored: Stored
    WIDTH: Shape  # width of y
    PARTS: Shape
    SIZE: Shape
    Y_STRIDE: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendKeysBuffers(Buffers):
    k: FloatIn
    step: IntIn = Fixed.STEP
    rows: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendKeys(Kernel[AppendKeysBuffers]):
    name, parts, flag = "append_keys", "recurrence", "APPEND_KEYS"
    stored: Stored
    HEADS: Shape
    KEY_HEADS: Shape
    KEY_DIM: Shape
    VALUE_DIM: Shape
    DECAYS: Shape  # decays per row and head
    K_STRIDE: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionBuffers(Buffers):
    q: FloatIn
    k: FloatIn
    v: FloatIn
    steps: FloatIn
    strengths: FloatIn
    step: IntIn = Fixed.STEP
    tables: IntIn
    rates: FloatIn
    skips: FloatIn
    rows: FloatOut
    states: FloatOut
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(Kernel[LinearAttentionBuffers]):
    name, parts, flag = "linear_attention", "recurrence", "LINEAR_ATTENTION"
    stored: Stored
    HEADS: Shape
    KEY_HEADS: Shape
    KEY_DIM: Shape
    VALUE_DIM: Shape
    DECAYS: Shape
    DELTA: bool
    TILED: bool
    HAS_SKIP: bool
    HAS_STEPS: bool
    HAS_STRENGTHS: bool
    Q_STRIDE: Shape
    K_STRIDE: Shape
    V_STRIDE: Shape
    G_STRIDE: Shape
    B_STRIDE: Shape
    Y_STRIDE: Shape

    @property
    def local_floats(self) -> int:
        """Room for a key, a query, the decay sums of a block, and two weights for each of its rows."""
        return 2 * self.KEY_DIM + 3 * BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAttention(LinearAttention):
    """Linear attention with decays per channel. Step sizes are required."""

    name, flag = "channel_attention", "CHANNEL_ATTENTION"

    @property
    def local_floats(self) -> int:
        """Room for a key, a query, the decay sums, their exponentials, and four partial weights per row of a block."""
        return 4 * self.KEY_DIM + 4 * BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScanBuffers(Buffers):
    x: FloatIn
    dt: FloatIn
    b: FloatIn
    c: FloatIn
    step: IntIn = Fixed.STEP
    tables: IntIn
    a: FloatIn
    d: FloatIn
    rows: FloatOut
    states: FloatOut
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan(Kernel[SelectiveScanBuffers]):
    name, parts, flag = "selective_scan", "recurrence", "SELECTIVE_SCAN"
    stored: Stored
    WIDTH: Shape
    STATE_DIM: Shape
    X_STRIDE: Shape
    DT_STRIDE: Shape
    B_STRIDE: Shape
    C_STRIDE: Shape
    Y_STRIDE: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class WkvRowsBuffers(Buffers):
    q: FloatIn
    k: FloatIn
    v: FloatIn
    decay: FloatIn
    probe: FloatIn
    erase: FloatIn
    step: IntIn = Fixed.STEP
    tables: IntIn
    rows: FloatOut
    states: FloatOut
    y: FloatOut


@dataclass(frozen=True, slots=True, kw_only=True)
class WkvRows(Kernel[WkvRowsBuffers]):
    """The WKV scan. K_STRIDE is the stride of q, k, decay, probe and erase; V_STRIDE is the stride of v and y."""

    name, parts, flag = "matrix_scan", "matrix_scan", "MATRIX_SCAN"
    stored: Stored
    HEADS: Shape
    KEY_DIM: Shape
    VALUE_DIM: Shape
    ERASES: bool
    BEFORE: bool
    K_STRIDE: Shape
    V_STRIDE: Shape
