"""The layout of recurrent layers' stores on the CPU: float32, one value per lane, rows padded to whole vectors.

Layout of one block (64 positions), with W values padded to whole vectors. A semicolon separates the block's two parts:

  RowLayer     rows (64, W)
  StateLayer   keys (key heads, key_dim, 64); per head: updates (64, W), state (key_dim, W), decays (64)
    channels   keys (key heads, 64, D); per head: updates (64, W), state (key_dim, W), decays (64, D)
  ScanLayer    rows (64) of {inputs (W), steps (W), B (N)}; states before and after (state_dim, W), newest row (W)
  WkvLayer  rows (64) of {values (W), keys (N), decays (N), ...}; per head: states (key_dim, W) before and after,
               newest row (W)

The lanes of keys are positions, as in attention. With a decay per key channel, the lanes are channels, padded to D.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.cpu.simd import LANES
from localllm.plan import BLOCK, CacheLayer, RowLayer, ScanLayer, StateLayer, Store, WkvLayer


def whole_strips(width: int) -> int:
    """Return `width` rounded up to whole vectors."""
    return -(-width // LANES) * LANES


@dataclass(frozen=True, slots=True)
class HeadState:
    """Byte offsets of one head of a `StateLayer` within a block."""

    updates: int
    state: int
    decays: int
    size: int


def head_state(of: StateLayer) -> HeadState:
    row = 4 * whole_strips(of.value_dim)
    state = BLOCK * row
    decays = state + of.key_dim * row
    return HeadState(0, state, decays, decays + 4 * BLOCK * (whole_strips(of.key_dim) if of.channels else 1))


def key_bytes(of: StateLayer) -> int:
    """Return the bytes of one key head in a block."""
    return 4 * BLOCK * (whole_strips(of.key_dim) if of.channels else of.key_dim)


@dataclass(frozen=True, slots=True)
class ScanStates:
    """Sizes of a row and of the states, and offsets of the states, in a scan layer, in bytes."""

    row: int
    before: int
    after: int
    newest: int
    size: int


def scan_states(width: int, state_dim: int) -> ScanStates:
    state = 4 * whole_strips(width) * state_dim
    return ScanStates(
        4 * (2 * whole_strips(width) + whole_strips(state_dim)),
        0,
        state,
        2 * state,
        2 * state + 4 * whole_strips(width),
    )


def matrix_states(of: WkvLayer) -> ScanStates:
    """Return the sizes for a `WkvLayer`. Offsets and state sizes are per head."""
    keys, state = (
        whole_strips(of.heads * of.key_dim) * (4 if of.erases else 2),
        4 * whole_strips(of.value_dim) * of.key_dim,
    )
    return ScanStates(
        4 * (whole_strips(of.heads * of.value_dim) + keys),
        0,
        state,
        2 * state,
        2 * state + 4 * whole_strips(of.value_dim),
    )


def store_bytes(layer: Store) -> tuple[int, int]:
    """Return the bytes of the two parts of a block."""
    match layer:
        case RowLayer(width):
            return BLOCK * 4 * whole_strips(width), 0
        case StateLayer(heads, key_heads):
            return key_heads * key_bytes(layer), heads * head_state(layer).size
        case ScanLayer(width, state_dim):
            states = scan_states(width, state_dim)
            return BLOCK * states.row, states.size
        case WkvLayer(heads):
            of_head = matrix_states(layer)
            return BLOCK * of_head.row, heads * of_head.size
        case CacheLayer():
            raise AssertionError("keys and values have types")
