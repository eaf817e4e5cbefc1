"""Declarations of the kernels of recurrent layers."""

from __future__ import annotations

from localllm.backends.gpu.kernels.kernel import Kernel, Macros, Shape
from localllm.plan import BLOCK


class Stored(Macros):
    """Offsets in the step buffer: of the slots of a store's rows, and of the stride of its block tables."""

    MAX_ROWS: Shape
    BLOCK_TOKENS: int = BLOCK
    SLOTS_AT: int
    TABLE_STRIDE_AT: int


class Convolve(Kernel):
    name, parts = "convolve", "recurrence"
    stored: Stored
    WIDTH: Shape
    SIZE: Shape
    X_STRIDE: Shape
    Y_STRIDE: Shape
    HAS_BIAS: bool


class AppendPooled(Kernel):
    name, parts = "append_pooled", "recurrence"
    stored: Stored
    WIDTH: Shape  # width of x
    X_STRIDE: Shape
    S_STRIDE: Shape


class PoolRows(Kernel):
    name, parts = "pool_rows", "recurrence"
    stored: Stored
    WIDTH: Shape  # width of y
    PARTS: Shape
    SIZE: Shape
    Y_STRIDE: Shape


class LinearHeads(Macros):
    """The heads of linear attention, whose keys and values the store holds."""

    HEADS: Shape
    KEY_HEADS: Shape
    KEY_DIM: Shape
    VALUE_DIM: Shape
    DECAYS: Shape  # decays per row and head


class AppendKeys(Kernel):
    name, parts = "append_keys", "recurrence"
    stored: Stored
    heads: LinearHeads
    K_STRIDE: Shape


class LinearAttention(Kernel):
    name, parts = "linear_attention", "recurrence"
    stored: Stored
    heads: LinearHeads
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
        return 2 * self.heads.KEY_DIM + 3 * BLOCK


class ChannelAttention(LinearAttention):
    """Linear attention with decays per channel. Step sizes are required."""

    name = "channel_attention"

    @property
    def local_floats(self) -> int:
        """Room for a key, a query, the decay sums, their exponentials, and four partial weights per row of a block."""
        return 4 * self.heads.KEY_DIM + 4 * BLOCK


class SelectiveScan(Kernel):
    name, parts = "selective_scan", "recurrence"
    stored: Stored
    WIDTH: Shape
    STATE_DIM: Shape
    X_STRIDE: Shape
    DT_STRIDE: Shape
    B_STRIDE: Shape
    C_STRIDE: Shape
    Y_STRIDE: Shape


class WkvRows(Kernel):
    """The WKV scan. K_STRIDE is the stride of q, k, decay, probe and erase; V_STRIDE is the stride of v and y."""

    name, parts = "matrix_scan", "matrix_scan"
    stored: Stored
    HEADS: Shape
    KEY_DIM: Shape
    VALUE_DIM: Shape
    ERASES: bool
    BEFORE: bool
    K_STRIDE: Shape
    V_STRIDE: Shape
