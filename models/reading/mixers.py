"""Metadata keys of recurrent mixers: which layers have a mixer, and its dimensions."""

from __future__ import annotations

import math

from localllm.models.config import RecurrentConfig
from localllm.models.errors import ModelError
from localllm.models.properties import Properties
from localllm.models.reading.bounds import MAX_FACTOR, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from localllm.models.reading.keys import Keys

RECURRENT_KEY, BOUND_KEY = "attention.recurrent_layers", "kda.gate_lower_bound"
_MAX_KERNEL = 64  # maximum taps of a convolution; known models have 3 or 4


def read_mixers(
    keys: Keys, row: Properties, kv_heads: tuple[int, ...], ffn_width: tuple[int, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return, per layer, whether it has attention, and whether it has a recurrent mixer."""
    layers, own = len(ffn_width), row.recurrent
    if own is None:
        return (True,) * layers, (False,) * layers
    match own.layers:
        case "all":
            recurs = (True,) * layers
        case "beside":
            return (True,) * layers, (True,) * layers
        case "interval":
            recurs = keys.periodic("full_attention_interval", layers, own.interval)
            if hasattr(keys.metadata.get(keys.prefix + RECURRENT_KEY), "__len__"):
                recurs = keys.periodic(RECURRENT_KEY, len(kv_heads), 0)[:layers]
        case "without_heads":
            recurs = tuple([not few for few in kv_heads[:layers]])
    if own.alone and own.layers != "all":
        recurs = tuple([recurrent and not inner for recurrent, inner in zip(recurs, ffn_width, strict=True)])
    fed = [own.alone and own.layers != "all" and inner > 0 for inner in ffn_width]
    attends = tuple([not recurrent and not alone for recurrent, alone in zip(recurs, fed, strict=True)])
    return attends, recurs


def read_recurrent(keys: Keys, row: Properties, heads: tuple[int, ...]) -> RecurrentConfig | None:
    if row.recurrent is None or row.recurrent.mixer in ("lightning", "rwkv6", "rwkv7"):  # their families read them
        return None
    if row.recurrent.mixer == "short_conv":
        return RecurrentConfig(keys.integer("shortconv.l_cache", 2, _MAX_KERNEL), 0, 0, 0, 0, False)
    if row.recurrent.mixer == "kda":
        kernel, size = keys.integer("ssm.conv_kernel", 2, _MAX_KERNEL), keys.integer("kda.head_dim", 1, MAX_HEAD_DIM)
        bound, sign = _bound(keys, row.recurrent.bounded), -1.0 if row.recurrent.bounded == "negative" else 1.0
        count = max(heads)
        return RecurrentConfig(kernel, count * size, size, count, count, False, bound=bound, sign=sign)
    sizes = RecurrentConfig(
        kernel=keys.integer("ssm.conv_kernel", 2, _MAX_KERNEL),
        inner=keys.integer("ssm.inner_size", 1, MAX_WIDTH),
        state=keys.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        heads=keys.integer("ssm.time_step_rank", 1, MAX_WIDTH),
        groups=keys.integer("ssm.group_count", 0, MAX_HEADS, default=0) or 1,
        norms=keys.flag("ssm.dt_b_c_rms", False),
    )
    if row.recurrent.mixer != "mamba" and (sizes.inner % sizes.heads or sizes.heads % sizes.groups):
        raise ModelError(
            f"{keys.prefix}ssm.time_step_rank: {sizes.heads} heads must divide ssm.inner_size {sizes.inner} and be a "
            f"multiple of ssm.group_count {sizes.groups}"
        )
    return sizes


def _bound(keys: Keys, bounded: str) -> float:
    """Return the lower bound of log decays; 0 for unbounded decays (missing or minus infinity)."""
    if not bounded:
        return 0.0
    if bounded == "negative":
        bound = keys.real(BOUND_KEY, -math.inf, 0.0, default=0.0)
        return bound if bound >= -MAX_FACTOR else 0.0
    if not keys.flag("kda.safe_gate", True):
        raise ModelError(f"{keys.prefix}kda.safe_gate: only bounded decays (true) are supported, found false")
    return keys.real(BOUND_KEY, -MAX_FACTOR, -1e-6)
