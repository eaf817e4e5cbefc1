"""Convert rope_parameters of transformers (formerly rope_scaling) to GGUF keys and tensors.

Each rope type has its own function; the formulas follow modeling_rope_utils.py in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import RopeTensors
from localllm.convert.tensor import LazyTensor, array_tensor

_KINDS_OF_FULL = ("full_attention", "indexed_attention", "compress")  # nested tables in rope_parameters

# Radians per position; gpt-oss's published GGUF files differ from the exact values by 2.2e-4.
_MOST_APART = 3e-4
GGUFKeys = dict[str, Any]  # keys without the architecture prefix


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """Rope settings in GGUF form: keys, tensors, and notes for the user."""

    keys: GGUFKeys
    tensors: tuple[LazyTensor, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Given:
    """The rope parameters of full-attention layers."""

    config: HfConfig
    rope: HfConfig
    base: float
    n_rot: int
    head_dim: int
    tensors_allowed: RopeTensors

    def original_context(self) -> int:
        value = self.rope.integer("original_max_position_embeddings")
        return value or self.config.needed("original_max_position_embeddings", "max_position_embeddings")

    def factor(self) -> float:
        value = self.rope.real("factor")
        if value is None or not value >= 1.0:
            raise self.rope.error("factor", value, "a number from 1 up")
        return value


def rope_of(config: HfConfig, head_dim: int, tensors_allowed: RopeTensors) -> RopeKeys:
    """Return keys, tensors and notes; raise ConvertError if the architecture cannot store this rope type."""
    parameters = config.table("rope_parameters", "rope_scaling")
    sliding: dict[str, Any] = {}
    kind_of_full = next((kind for kind in _KINDS_OF_FULL if kind in parameters), None)
    if kind_of_full is not None:
        whole = config.below("rope_parameters", parameters)
        parameters, sliding = whole.table(kind_of_full), whole.table("sliding_attention")
    rope = config.below("rope_parameters", parameters)
    base = rope.real("rope_theta") or config.real("rope_theta", "rotary_emb_base") or 10000.0
    share = rope.real("partial_rotary_factor") or config.real("partial_rotary_factor", "rope_pct") or 1.0
    n_rot = int(head_dim * share)
    if not min(head_dim, 2) <= n_rot <= head_dim:
        raise rope.error("partial_rotary_factor", share, f"a share of the {head_dim} values of a head, at least 2")
    given = _Given(config, rope, base, n_rot, head_dim, tensors_allowed)
    keys: GGUFKeys = {"rope.dimension_count": n_rot, "rope.freq_base": base}
    local = config.below("sliding_attention", sliding)
    if (slow := local.real("rope_theta") or config.real("rope_local_base_freq")) is not None:
        keys["rope.freq_base_swa"] = slow
    kind = str(rope.get("rope_type", "type") or "default").lower()
    if kind not in _KINDS:
        raise rope.error("rope_type", kind, f"one of {', '.join(_KINDS)}")
    found = _KINDS[kind](given)
    if found.tensors and not tensors_allowed:
        raise ConvertError(
            f"{rope.path}: rope_type {kind} needs frequency factors, which have no place in GGUF files of this "
            "architecture: llama.cpp would not load the file"
        )
    if tensors_allowed == "whole":  # pad with 1 to the number of pairs of a fully rotated head
        found = replace(found, tensors=tuple([_padded(tensor, head_dim // 2) for tensor in found.tensors]))
    if (other := local.get("rope_type") or "default") not in ("default", kind):
        raise local.error("rope_type", other, "default")
    return RopeKeys(keys | found.keys, found.tensors, found.notes)


def _padded(tensor: LazyTensor, count: int) -> LazyTensor:
    factors = tensor.read(0, 1).view(np.float32)[0]
    return array_tensor(tensor.name, np.concatenate([factors, np.ones(count - len(factors), np.float32)]))


def _default(given: _Given) -> RopeKeys:
    return RopeKeys({})


def _linear(given: _Given) -> RopeKeys:
    return RopeKeys({"rope.scaling.type": "linear", "rope.scaling.factor": given.factor()})


def _dynamic(given: _Given) -> RopeKeys:
    """Scale the base by Hunyuan's fixed alpha. In other models the scale depends on the text length, and is omitted."""
    alpha, width = given.rope.real("alpha"), given.head_dim
    if alpha is not None and not alpha >= 1.0:
        raise given.rope.error("alpha", alpha, "a number from 1 up")
    if alpha is not None and width > 2:
        return RopeKeys({"rope.freq_base": given.base * alpha ** (width / (width - 2))})
    return RopeKeys({}, notes=("dynamic RoPE scaling is ignored: correct up to the trained context",))


def _yarn(given: _Given) -> RopeKeys:
    rope, factor = given.rope, given.factor()
    keys: GGUFKeys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": given.original_context(),
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (value := rope.real(name)) is not None:
            keys["rope.scaling." + key] = value
    automatic = _yarn_magnitude(factor, 1.0)  # GGUF readers apply this magnitude
    wanted = rope.real("attention_factor")
    mscale, all_dim = rope.real("mscale"), rope.real("mscale_all_dim")
    if wanted is None and mscale and all_dim:
        wanted = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, all_dim)
    if wanted is not None and not math.isclose(wanted, automatic, rel_tol=1e-6):
        keys["rope.scaling.attn_factor"] = wanted / automatic
    if (growth := rope.real("llama_4_scaling_beta")) is not None:
        keys["attention.temperature_scale"] = growth
    return RopeKeys(keys) if rope.flag("truncate") is not False else _yarn_exact(given, keys, wanted or automatic)


def _yarn_exact(given: _Given, keys: GGUFKeys, magnitude: float) -> RopeKeys:
    """Return YaRN with a ramp that starts and ends at fractional pairs (`truncate` false). The GGUF form of YaRN uses
    whole pairs.

    If the architecture has frequency factors, they store the exact values. Otherwise the difference must be small, and
    a note reports it.
    """
    rope, factor, original = given.rope, given.factor(), given.original_context()
    fast, slow = rope.real("beta_fast") or 32.0, rope.real("beta_slow") or 1.0
    ends = [
        given.n_rot * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(given.base)) for turns in (fast, slow)
    ]
    exact = _yarn_factors(given.n_rot, factor, *ends)
    if given.tensors_allowed:
        kept = {key: value for key, value in keys.items() if not key.startswith("rope.scaling.")}
        kept |= {"rope.scaling.type": "none", "rope.scaling.attn_factor": magnitude}
        return RopeKeys(kept, (array_tensor("rope_freqs.weight", exact.astype(np.float32)),))
    whole = _yarn_factors(given.n_rot, factor, math.floor(ends[0]), math.ceil(ends[1]))
    frequencies = given.base ** (-np.arange(0, given.n_rot, 2) / given.n_rot)
    apart = float(np.abs(frequencies / exact - frequencies / whole).max())  # radians per position
    if apart > _MOST_APART:
        raise rope.error("truncate", False, f"True: angles would differ by {apart:.1g} radians per position")
    note = f"GGUF files cannot store rope truncate false: angles differ by up to {apart:.1g} radians per position"
    return RopeKeys(keys, notes=(note,))


def _yarn_factors(n_rot: int, factor: float, low: float, high: float) -> NDArray[np.float64]:
    """Return the divisor of each pair's frequency. The ramp goes from pair `low` to pair `high`."""
    low, high = max(low, 0.0), min(high, n_rot - 1.0)
    ramp = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    factors: NDArray[np.float64] = 1.0 / (ramp / factor + 1.0 - ramp)
    return factors


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(given: _Given) -> RopeKeys:
    """Return Llama 3's scaling: divide low frequencies by the factor, keep high frequencies, and interpolate between
    them."""
    rope, factor, original = given.rope, given.factor(), given.original_context()
    low, high = (rope.real(f"{name}_freq_factor") or default for name, default in (("low", 1.0), ("high", 4.0)))
    waves = 2 * math.pi * given.base ** (np.arange(0, given.n_rot, 2) / given.n_rot)
    with np.errstate(divide="ignore", invalid="ignore"):  # the next line replaces the infinite values
        smooth = (original / waves - low) / (high - low)
        factors = 1.0 / ((1.0 - smooth) / factor + smooth)
    factors = np.where(waves < original / high, 1.0, np.where(waves > original / low, factor, factors))
    return RopeKeys({}, (array_tensor("rope_freqs.weight", factors.astype(np.float32)),))


def _longrope(given: _Given) -> RopeKeys:
    """Return the long and short frequency factors (LongRoPE, arXiv:2402.13753)."""
    rope, original = given.rope, given.original_context()
    factor = rope.real("factor") or given.config.needed("max_position_embeddings") / original
    magnitude, beyond = rope.real("attention_factor", "short_mscale"), rope.real("long_mscale")
    if beyond is not None and beyond != magnitude:
        raise rope.error("long_mscale", beyond, f"{magnitude}: GGUF files have one factor for all contexts")
    if magnitude is None:
        magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    keys = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": magnitude,
    }
    tensors = [
        array_tensor(f"rope_factors_{name}.weight", _factors(given, f"{name}_factor")) for name in ("long", "short")
    ]
    return RopeKeys(keys, tuple(tensors))


def _proportional(given: _Given) -> RopeKeys:
    """Rotate only the first pairs, at the frequencies of a fully rotated head. Huge factors stop the rotation of the
    other pairs."""
    factors = np.where(np.arange(given.head_dim // 2) < given.n_rot // 2, 1.0, 1e30)
    return RopeKeys({}, (array_tensor("rope_freqs.weight", factors.astype(np.float32)),))


def _factors(given: _Given, name: str) -> NDArray[np.float32]:
    value = given.rope.get(name)
    count = given.n_rot // 2
    if not isinstance(value, list) or len(value) != count:
        found = f"a list of {len(value)}" if isinstance(value, list) else value
        raise given.rope.error(name, found, f"a list of {count} numbers")
    if not all(type(v) in (int, float) and math.isfinite(v) and v > 0 for v in value):
        raise given.rope.error(name, "a list with something else", "positive numbers only")
    return np.array(value, np.float32)


_KINDS: dict[str, Callable[[_Given], RopeKeys]] = {
    "default": _default,
    "none": _default,
    "mrope": _default,  # text positions only
    "linear": _linear,
    "dynamic": _dynamic,
    "xdrope": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}
