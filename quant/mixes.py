"""Chooses the format of every tensor as llama-quantize does for its types: the types are data for one function.

`MIXES` has an entry per type. `choose_formats` gives the same formats, tensor by tensor, as llama-quantize
(src/llama-quant.cpp, llama.cpp of 2026-10-01). The rules use the role of a tensor, derived from its name, the number of
earlier tensors with the same role, and a few sizes of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from localllm.quant.format import QuantError
from localllm.quant.table import FORMATS

FLOATS = ("F32", "F16", "BF16", "F64")  # not block formats, so neither rules nor fallbacks apply


@dataclass(frozen=True, slots=True)
class Geometry:
    """Properties of the model that the rules use; head counts and sizes are taken from the first layer."""

    architecture: str
    layers: int  # number of layers in the GGUF
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0

    @property
    def group(self) -> int:
        """The number of query heads per KV head; 0 without attention."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """Whether the layer count is that of a 70B model, whose few KV heads are stored with more bits."""
        layers = {"llama": 80, "llama-embed": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
        same_heads = self.architecture.startswith("llama") and self.heads == self.kv_heads
        return self.layers == layers.get(self.architecture) and not same_heads


@dataclass(frozen=True, slots=True)
class MixOptions:
    """The user's changes to a mix. `overrides` lists (regular expression, format) pairs; the first match applies."""

    pure: bool = False  # use the mix's default format everywhere
    leave_output: bool = False
    output: str | None = None
    embedding: str | None = None
    overrides: tuple[tuple[re.Pattern[str], str], ...] = ()
    imatrix: bool = False  # whether an importance matrix is given


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The chosen format of one tensor."""

    name: str
    format: str
    wanted: str  # the format chosen by the rules; `format` differs if the tensor's rows do not fill whole blocks
    needs_imatrix: bool  # whether llama-quantize requires an importance matrix


class Rule:
    """Assigns `format` to tensors of a role if all conditions in `when` are true; the first match applies."""

    __slots__ = ("format", "role", "when")

    def __init__(self, role: str, when: str, format: str) -> None:
        self.role, self.when, self.format = role, tuple(when.split()), format


@dataclass(frozen=True, slots=True)
class QuantMix:
    """A type of llama-quantize; `file_type` is its number in general.file_type."""

    name: str
    file_type: int
    format: str
    rules: tuple[Rule, ...] = ()
    output: str = "Q6_K"  # format of the output matrix, or of tied token embeddings
    embedding: str = ""  # format of other token embeddings; empty: `format`
    low: bool = False  # whether this is a type below three bits, with different rules for wide models
    experts: str = ""  # format of stacked expert matrices; if set, all other matrices get Q8_0


# -- the table -----------------------------------------------------------------------------------------------------

_MOE_OUT = Rule("attn_output", "8-experts not-falcon", "Q5_K")
_MORE_BITS = (Rule("attn_v", "more-bits", "Q6_K"), Rule("ffn_down", "not-falcon more-bits", "Q6_K"))
_IQ4 = (Rule("attn_v", "wide", "Q5_K"), Rule("ffn_down", "first-8th plain", "Q5_K"), _MOE_OUT)


def _low(better: str, attention_output: str) -> tuple[Rule, ...]:
    return (
        Rule("attn_v", "wide", "Q4_K"),
        Rule("attn_v", "4-experts", "Q4_K"),
        Rule("attn_v", "", better),
        Rule("attn_k", "8-experts", "Q4_K"),
        Rule("ffn_down", "first-8th", better),
        Rule("attn_output", "8-experts", "Q5_K"),
        *([Rule("attn_output", "", attention_output)] if attention_output else []),
    )


# fmt: off
_ROWS = (
    QuantMix("F32",   0, "F32"),
    QuantMix("F16",   1, "F16"),
    QuantMix("BF16", 32, "BF16"),
    QuantMix("Q1_0", 40, "Q1_0"),
    QuantMix("Q2_0", 41, "Q2_0", embedding="Q4_K"),
    QuantMix("Q4_0",  2, "Q4_0", (Rule("ffn_down", "first-8th imatrix", "Q4_1"),)),
    QuantMix("Q4_1",  3, "Q4_1"),
    QuantMix("Q5_0",  8, "Q5_0", (Rule("ffn_down", "first-8th imatrix", "Q5_1"),)),
    QuantMix("Q5_1",  9, "Q5_1"),
    QuantMix("Q8_0",  7, "Q8_0", output="Q8_0"),
    QuantMix("Q2_K", 10, "Q2_K", (
        Rule("attn_v", "wide", "Q4_K"), Rule("attn_v", "", "Q3_K"), Rule("ffn_down", "", "Q3_K"),
        _MOE_OUT, Rule("attn_output", "not-8-experts not-falcon", "Q3_K"))),
    QuantMix("Q2_K_S", 21, "Q2_K", (Rule("attn_v", "wide", "Q4_K"), Rule("ffn_down", "first-8th", "Q4_K"))),
    QuantMix("Q3_K_S", 11, "Q3_K", (_MOE_OUT,)),
    QuantMix("Q3_K_M", 12, "Q3_K", (
        Rule("attn_v", "first-2", "Q5_K"), Rule("attn_v", "", "Q4_K"),
        Rule("ffn_down", "first-16th", "Q5_K"), Rule("ffn_down", "not-falcon", "Q4_K"),
        Rule("ffn_down", "more-bits", "Q4_K"),
        _MOE_OUT, Rule("attn_output", "not-8-experts not-falcon", "Q4_K"))),
    QuantMix("Q3_K_L", 13, "Q3_K", (
        Rule("attn_v", "", "Q5_K"), Rule("ffn_down", "falcon", "Q4_K"), Rule("ffn_down", "", "Q5_K"),
        Rule("attn_output", "falcon", "Q4_K"), Rule("attn_output", "not-8-experts", "Q5_K"))),
    QuantMix("Q4_K_S", 14, "Q4_K", (
        Rule("attn_v", "first-4", "Q5_K"), Rule("ffn_down", "not-falcon first-8th", "Q5_K"), _MOE_OUT)),
    QuantMix("Q4_K_M", 15, "Q4_K", (
        *_MORE_BITS, Rule("ffn_down", "falcon first-16th", "Q6_K"), Rule("ffn_down", "falcon more-bits", "Q5_K"),
        _MOE_OUT)),
    QuantMix("Q5_K_S", 16, "Q5_K"),
    QuantMix("Q5_K_M", 17, "Q5_K", (Rule("attn_v", "more-bits", "Q6_K"), Rule("ffn_down", "more-bits", "Q6_K"))),
    QuantMix("Q6_K", 18, "Q6_K"),
    QuantMix("IQ1_S",   24, "IQ1_S",   _low("Q2_K", "IQ2_XXS"), "Q5_K", "Q2_K", low=True),
    QuantMix("IQ1_M",   31, "IQ1_M",   _low("Q2_K", "IQ2_XXS"), "Q5_K", "Q2_K", low=True),
    QuantMix("IQ2_XXS", 19, "IQ2_XXS", _low("Q2_K", ""),        "Q5_K", "Q2_K", low=True),
    QuantMix("IQ2_XS",  20, "IQ2_XS",  _low("Q2_K", ""),        "Q5_K", "Q2_K", low=True),
    QuantMix("IQ2_S",   28, "IQ2_XS",  _low("IQ3_S", "IQ3_S"),  "Q5_K", "IQ3_S", low=True),
    QuantMix("IQ2_M",   29, "IQ2_S",   _low("IQ3_S", "IQ3_S"),  "Q5_K", "IQ3_S", low=True),
    QuantMix("IQ3_XXS", 23, "IQ3_XXS", (
        Rule("attn_v", "wide", "Q4_K"), Rule("attn_v", "plain", "IQ3_S"),
        Rule("attn_k", "", "IQ2_S"), Rule("attn_q", "", "IQ2_S"),
        Rule("ffn_down", "plain first-8th", "Q4_K"), Rule("ffn_down", "plain", "Q3_K"),
        _MOE_OUT, Rule("attn_output", "not-8-experts not-falcon", "IQ3_S")), "Q5_K", "IQ3_S"),
    QuantMix("IQ3_XS", 22, "IQ3_S", (
        Rule("attn_v", "wide", "Q4_K"), Rule("attn_k", "", "IQ3_XXS"), Rule("attn_q", "", "IQ3_XXS"),
        Rule("ffn_gate", "middle", "IQ3_XXS"), Rule("ffn_up", "middle", "IQ3_XXS"), _MOE_OUT)),
    QuantMix("IQ3_S", 26, "IQ3_S", (Rule("attn_v", "wide", "Q4_K"), _MOE_OUT)),
    QuantMix("IQ3_M", 27, "IQ3_S", (
        Rule("attn_v", "", "Q4_K"), Rule("ffn_down", "first-8th", "Q4_K"),
        Rule("ffn_down", "8-experts more-bits", "Q4_K"),
        _MOE_OUT, Rule("attn_output", "not-8-experts not-falcon", "Q4_K"))),
    QuantMix("IQ4_NL", 25, "IQ4_NL", _IQ4),
    QuantMix("IQ4_XS", 30, "IQ4_XS", _IQ4),
    QuantMix("TQ1_0", 36, "TQ1_0", embedding="Q4_K"),
    QuantMix("TQ2_0", 37, "TQ2_0", embedding="Q4_K"),
    QuantMix("MXFP4", 38, "MXFP4"),  # not a llama-quantize type: quantizes all matrices, not only experts
    QuantMix("MXFP4_MOE", 38, "MXFP4", output="Q8_0", experts="MXFP4"),
)
# fmt: on
MIXES: dict[str, QuantMix] = {row.name: row for row in _ROWS}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_BY_NUMBER = {str(row.file_type): row.name for row in _ROWS}  # if types share a number, llama-quantize's type

_FALLBACK = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
_NEED_IMATRIX = ("IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_M", "IQ1_S")

# Names of matrices that are not quantized: small matrices, tables, and matrices that are not used in products.
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
_KEPT_PARTS = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d"
    r"|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight"
    r"|\.position_embd|sam\.pos_embd|sam\.neck\.|sam\.net_|\.rel_pos|\.patch_embd|\.patch_merger"
    r"|a\.rvq\.codebook|mm\.a\.code_embd"
)
_KEPT_PARTS_OF = {
    "glm5-next": re.compile(
        r"hc_|indexer\.(attn_q_b|attn_k|proj)|indexer_compressor_(gate|ape)|ssm_(f_a|f_b|g_a|g_b|beta)\.weight"
        r"|attn_kv_a_mqa\.weight|attn_[kv]_b\.weight"
    )
}
_EIGHT_BITS_OF = {"glm5-next": re.compile(r"attn_q_a|attn_q_b|nextn\.eh_proj")}

_ROLES = (  # (role, pattern of names); the first match applies
    ("output", re.compile(r"^output\.weight$")),
    ("embedding", re.compile(r"^(per_layer_)?token_embd\.weight$")),
    ("attn_v", re.compile(r"attn_(qkv|kv_b|v)\.weight")),
    ("attn_k", re.compile(r"attn_k\.weight")),
    ("attn_q", re.compile(r"attn_q\.weight")),
    ("attn_output", re.compile(r"attn_output\.weight")),
    ("ffn_up", re.compile(r"ffn_up")),
    ("ffn_gate", re.compile(r"ffn_gate")),
    ("ffn_down", re.compile(r"ffn_down")),
)
_COUNTED = ("attn_v", "ffn_down", "ffn_gate", "ffn_up")


def find(name: str) -> QuantMix:
    """Return the mix with this name (in any case) or number (15 is Q4_K_M); raise QuantError for an unknown mix."""
    upper = name.upper()
    mix = MIXES.get(ALIASES.get(upper) or _BY_NUMBER.get(upper, upper))
    if mix is None:
        raise QuantError(f"unknown type {name!r}; known: {', '.join([*MIXES, *ALIASES])}, COPY, and their numbers")
    return mix


def role(name: str) -> str:
    """Return the role of a tensor by its name; "" if no rule refers to it."""
    return next((what for what, pattern in _ROLES if pattern.search(name)), "")


def allows(name: str, shape: Sequence[int], architecture: str) -> bool:
    """Return whether a tensor may be quantized: a matrix of weights that need not keep its format."""
    own = _KEPT_PARTS_OF.get(architecture)
    return (
        prod(shape[:-1]) > 1
        and name.endswith("weight")
        and name not in _KEPT_NAMES
        and not _KEPT_PARTS.search(name)
        and not (own and own.search(name))
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in llama-quantize's order: tensors outside layers first, then layer by layer, each group sorted."""
    return sorted(names, key=lambda name: (_layer(name), name.encode()))


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d{1,9})", name)
    return int(found[1]) if found else -1


# -- choosing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a tensor: index `i` of `n` tensors with its role."""

    i: int
    n: int
    geometry: Geometry
    imatrix: bool


def _more_bits(at: _Place) -> bool:
    """Whether the tensor is in the first or last eighth, or every third tensor in between."""
    return at.i < at.n // 8 or at.i >= 7 * at.n // 8 or (at.i - at.n // 8) % 3 == 2


_CONDITIONS: dict[str, Callable[[_Place], bool]] = {
    "wide": lambda at: at.geometry.group >= 4,  # attn_v is much smaller than attn_q
    "4-experts": lambda at: at.geometry.experts >= 4,
    "8-experts": lambda at: at.geometry.experts == 8,
    "not-8-experts": lambda at: at.geometry.experts != 8,
    "falcon": lambda at: at.geometry.architecture == "falcon",
    "not-falcon": lambda at: at.geometry.architecture != "falcon",
    "imatrix": lambda at: at.imatrix,
    "plain": lambda at: not at.imatrix,
    "first-2": lambda at: at.i < 2,
    "first-4": lambda at: at.i < 4,
    "first-8th": lambda at: at.i < at.n // 8,
    "first-16th": lambda at: at.i < at.n // 16,
    "middle": lambda at: at.n // 8 <= at.i < 7 * at.n // 8,
    "more-bits": _more_bits,
}


@dataclass(slots=True)
class _State:
    """State of the pass over the tensors."""

    values: int  # number of matrices with attn_v's role
    tied: bool
    seen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))


def choose_formats(
    mix: QuantMix, geometry: Geometry, tensors: Sequence[tuple[str, tuple[int, ...], str]], options: MixOptions
) -> list[FormatChoice]:
    """Choose a format for every tensor (name, row-major shape, current format), given in the order of `in_order`.

    Raise QuantError if a rule needs a layer number that the name lacks, or if no format fits the rows of a tensor.
    """
    roles = [role(name) for name, _, _ in tensors]
    state = _State(roles.count("attn_v"), "output" not in roles)
    chosen = []
    for (name, shape, now), what in zip(tensors, roles, strict=True):
        kept = not allows(name, shape, geometry.architecture) or (options.leave_output and what == "output")
        wanted = now if kept else _wanted(mix, geometry, state, name, shape, what, options)
        given = _given(options, name, what)
        format_name = wanted if kept or given in ("output", "embedding") else _fitting(name, shape[-1], wanted)
        low = format_name in _NEED_IMATRIX or (format_name == "Q2_K" and mix.name == "Q2_K_S")
        exempt = name in ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
        chosen.append(FormatChoice(name, format_name, wanted, low and not exempt and not kept))
    return chosen


def _given(options: MixOptions, name: str, what: str) -> str:
    """Return which user option applies to a tensor: "embedding", "output", "override", or ""."""
    named = any(pattern.search(name) for pattern, _ in options.overrides)
    if options.embedding and what == "embedding" and not (named and name.startswith("per_layer_")):
        return "embedding"
    if options.output and what == "output":
        return "output"
    return "override" if named else ""


def _wanted(
    mix: QuantMix, geometry: Geometry, state: _State, name: str, shape: tuple[int, ...], what: str, options: MixOptions
) -> str:
    match _given(options, name, what):
        case "embedding":
            return options.embedding or ""
        case "output":
            return options.output or ""
        case "override":
            return next(to for pattern, to in options.overrides if pattern.search(name))
    if options.pure or mix.format in FLOATS:
        return mix.format
    eight = _EIGHT_BITS_OF.get(geometry.architecture)
    if eight and eight.search(name):
        return "Q8_0"
    if what == "output" or (what == "embedding" and state.tied):
        return _output(mix, geometry, shape[-1], options)
    if mix.experts:
        stacked = len(shape) > 2 and prod(shape[:-2]) > 1
        expert = stacked and (geometry.architecture != "bailingmoe3" or what in ("ffn_up", "ffn_gate", "ffn_down"))
        return mix.experts if expert else "Q8_0"
    if what == "embedding":
        return mix.embedding or mix.format
    return _by_rules(mix, geometry, state, name, what, options.imatrix)


def _output(mix: QuantMix, geometry: Geometry, columns: int, options: MixOptions) -> str:
    if options.output:  # also applies to tied token embeddings
        return options.output
    fits = columns % FORMATS[mix.format].block_values == 0
    return mix.output if fits and geometry.architecture != "falcon" else "Q8_0"


def _by_rules(mix: QuantMix, geometry: Geometry, state: _State, name: str, what: str, imatrix: bool) -> str:
    i = state.seen.get(what, 0)
    if what in _COUNTED:
        state.seen[what] += 1
    layered = what in ("ffn_down", "ffn_gate", "ffn_up") and not mix.low
    if layered and geometry.experts > 1:  # separate expert tensors are not ordered by layer
        i = _layer(name)
        if not 0 <= i < geometry.layers:
            raise QuantError(
                f"{name!r}: its name has no layer number from 0 to {geometry.layers - 1}, which {mix.name} needs"
            )
    at = _Place(i, state.values if what == "attn_v" else geometry.layers, geometry, imatrix)
    holds = partial(_holds, at)
    found = next((rule.format for rule in mix.rules if rule.role == what and all(map(holds, rule.when))), mix.format)
    if mix.low:
        return found
    if what == "attn_v" and geometry.is_70b and found in ("Q3_K", "Q4_K"):
        found = "Q5_K"
    return "Q8_0" if what in ("attn_v", "attn_k") and geometry.experts == 8 else found


def _holds(at: _Place, condition: str) -> bool:
    return _CONDITIONS[condition](at)


def _fitting(name: str, columns: int, wanted: str) -> str:
    """Return `wanted`, or the closest format if rows of `columns` values do not fill its blocks."""
    block = FORMATS[wanted].block_values
    if columns % block == 0:
        return wanted
    fallback = _FALLBACK.get(wanted, wanted if block <= 32 else "")
    if not fallback:
        raise QuantError(
            f"{name!r}: rows of {columns} values do not fill blocks of {block}, and {wanted} has no fallback"
        )
    return fallback if columns % FORMATS[fallback].block_values == 0 else "F16"
