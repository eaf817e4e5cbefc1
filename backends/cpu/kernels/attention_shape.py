"""The parameters of a compiled attention kernel, and its scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.cpu.cache import CACHE, CacheRow
from localllm.backends.cpu.kernels.attend import SCALED, query_bytes
from localllm.backends.cpu.kernels.softmax import partial_row_bytes, state_bytes
from localllm.backends.cpu.memory import aligned
from localllm.plan import BLOCK


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters that specialize an attention kernel."""

    head_dim: int  # dimension of a key
    value_dim: int
    group: int  # query heads per KV head
    kv_heads: int
    key_type: str = "f16"
    value_type: str = "f16"
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    slopes: bool = False
    chunked: bool = False
    causal: bool = True
    after: bool = False  # attend only to positions after the encoder text
    reach: int = 0  # largest distance with its own bias in `distances`; 0: no relative position bias
    selected: int = 0  # maximum number of positions that top-k attention selects per row; 0: no selection
    slices: int = 1  # number of selections per row: one, or one per KV head
    whole: bool = False  # the selection consists of whole cache blocks
    once: bool = False  # values are the first dimensions of the keys
    every: int = 0  # positions per pool; 0: no pools
    chosen: int = 0  # maximum number of pools that a row attends to; 0 means all
    spans: bool = False  # rows of a span see each other

    @property
    def name(self) -> str:
        extras = "".join(f"_{n}" for n in ("window", "softcap", "sinks", "slopes", "chunked") if getattr(self, n))
        extras += "" if self.causal else "_both_ways"
        extras += "_after" if self.after else ""
        extras += f"_reach{self.reach}" if self.reach else ""
        extras += f"_selected_{self.selected}_{self.slices}" if self.selected else ""
        extras += "_whole" * self.whole + "_once" * self.once
        extras += f"_every_{self.every}_{self.chosen}" if self.every else ""
        extras += "_spans" * self.spans
        return (
            f"{self.head_dim}_{self.value_dim}_{self.group}_{self.kv_heads}_{self.key_type}_{self.value_type}{extras}"
        )

    @property
    def piece(self) -> int:
        """Number of query heads per piece. If a KV head has many query heads, they are divided into several pieces."""
        return MAX_QUERY_ROWS if self.group % MAX_QUERY_ROWS == 0 else self.group

    @property
    def of_head(self) -> int:
        """Number of pieces per KV head, which all read the same keys and values."""
        return self.group // self.piece

    @property
    def pieces(self) -> int:
        return self.kv_heads * self.of_head

    @property
    def gathered(self) -> bool:
        """Whether cache rows are copied to a block before they are read."""
        return self.every > 0 or (self.selected > 0 and not self.whole)

    def listed(self, position: int, window: int) -> int:
        """Return the maximum number of cache rows that a token at this position reads, if positions start at 0."""
        if self.every:
            pools = (position + 1) // self.every
            return min(position + 1, window) + (min(pools, self.chosen) if self.chosen else pools)
        return min(position + 1, self.selected or position + 1)

    @property
    def keys(self) -> CacheRow:
        return CACHE[self.key_type]

    @property
    def values(self) -> CacheRow:
        return CACHE[self.value_type]

    @property
    def width(self) -> int:
        return self.values.width(self.value_dim)

    @property
    def tokens(self) -> int:
        """Number of tokens per tile: a power of two, chosen so that a tile has at most 16 query rows per piece.

        The number is 1 if every row reads different positions, as with top-k attention or pools.
        """
        tokens = 1
        while not self.selected and not self.every and tokens * 2 * self.group <= MAX_QUERY_ROWS:
            tokens *= 2
        return tokens

    def state_bytes(self, rows: int) -> int:
        """Return the bytes of the outputs, maxima and sums of some query rows."""
        return state_bytes(rows, self.width)


MAX_QUERY_ROWS = 16


@dataclass(frozen=True, slots=True)
class Scratch:
    """Offsets within a thread's scratch memory."""

    queries: int
    head: int  # one head, padded to whole groups
    scores: int
    scaled: int
    shrink: int
    state: int
    final: int
    entries: int  # addresses of the gathered rows: 64 of keys, 64 of values
    keys: int  # a gathered block of keys and one of values
    values: int
    size: int


def scratch(shape: AttentionShape) -> Scratch:
    rows = shape.piece * shape.tokens
    sizes = (
        shape.pieces * rows * query_bytes(shape.keys, shape.head_dim),
        4 * aligned(shape.head_dim + 32),
        rows * BLOCK * 4,
        SCALED * BLOCK * 4,
        2 * partial_row_bytes(rows),
        shape.of_head * shape.state_bytes(rows),
        shape.of_head * shape.state_bytes(rows),
        2 * 8 * BLOCK if shape.gathered else 0,
        shape.keys.key_bytes(shape.head_dim) if shape.gathered else 0,
        shape.values.value_bytes(shape.value_dim) if shape.gathered else 0,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + aligned(size))
    return Scratch(*offsets)


def scratch_bytes(shape: AttentionShape) -> int:
    """Return the bytes of scratch memory per thread."""
    return scratch(shape).size
