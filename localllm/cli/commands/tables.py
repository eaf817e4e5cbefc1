"""The support matrix as text, generated from the tables in the code. `localllm show` and the documentation print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.cli.terminal.formatting import markdown, text_table

if TYPE_CHECKING:
    from localllm.models.architecture import Architecture

INTEGERS = ("I8", "I16", "I32", "I64")  # formats that occur in files but never hold weights


def formats(room: int = 0) -> str:
    """Return the table of weight formats: bits per weight, and whether each format can be read, written and run.

    It fits a terminal of `room` columns.
    """
    from localllm import quant
    from localllm.backends.cpu.unpack import FORMATS as kernels

    rows = [
        (
            each.name,
            f"{8 * each.block_bytes / each.block_values:g}",
            f"{each.block_values} in {each.block_bytes} bytes",
            "yes",
            "yes" if each.quantize else "",
            "yes" if each.name in kernels else "",
        )
        for each in quant.FORMATS.values()
        if each.name not in INTEGERS
    ]
    header = ("format", "bits per weight", "block", "read", "write", "cpu kernels")
    return text_table(header, rows, right=("bits per weight",), room=room)


def architectures(room: int = 0) -> str:
    """Return the table of architectures, with the properties that a model file does not contain.

    It fits a terminal of `room` columns.
    """
    from localllm.models import ARCHITECTURES

    rows = []
    for each in ARCHITECTURES.values():
        attends = each.recurrent is None or each.recurrent.layers != "all"
        rope = {"interleaved": "neighbours", "neox": "halves", None: ""}[each.rope_style]
        if not attends or each.no_rope_every == 1:
            rope = ""
        elif each.no_rope_every:
            rope += f", every {each.no_rope_every}th layer none"
        norms = {"rms": "RMS", "layer": "layer"}[each.norm] + (", q and k" if each.qk_norm else "")
        rows.append(
            (
                each.name,
                f"{each.ffn}, {'situ' if each.limits == 'situ' else each.activation.replace('_', ' ')}",
                norms,
                rope,
                each.routing.gating.replace("_", " ") if each.routing else "",
                _state(each, attends),
            )
        )
    header = (
        "architecture",
        "feed-forward",
        "norms",
        "rotated dimensions",
        "experts chosen by",
        "cache contents",
    )
    return text_table(header, rows, room=room)


MIXERS = {
    "short_conv": "convolution rows",
    "delta_net": "convolution rows, delta-net states",
    "kda": "convolution rows, delta-net states",
    "lightning": "lightning states",
    "mamba": "convolution rows, Mamba states",
    "mamba2": "convolution rows, Mamba-2 states",
    "plamo2": "convolution rows, Mamba-2 states",
    "rwkv6": "shifted rows, RWKV states",
    "rwkv7": "shifted rows, RWKV states",
}


def _state(row: Architecture, attends: bool) -> str:
    kinds = []
    if attends:
        kinds.append({"heads": "keys and values", "latent": "latent rows", "shared": "shared rows"}[row.cache])
    if row.cache == "shared":
        kinds.append("pools")
    if (row.latent or attends) and row.sliding:
        kinds.append("windows")
    if row.indexer is not None:
        kinds.append("index keys")
    if row.recurrent is not None:
        kinds.append(MIXERS[row.recurrent.mixer])
    return ", ".join(kinds)


def tokenizers() -> str:
    """Return the table of tokenizer models, and the special tokens that each model adds by default."""
    from localllm.tokenizer.kinds import VOCAB_KINDS

    rows = [
        (name, kind.method, ", ".join(kind.adds).replace("seperator", "separator"))
        for name, kind in VOCAB_KINDS.items()
    ]
    return markdown(("tokenizer.ggml.model", "method", "adds"), rows)


def pre_tokenizers() -> str:
    """Return the names of `tokenizer.ggml.pre`, one row per rule, and the flags that a name implies."""
    from localllm.tokenizer.pretokenize import PRE_RULES, PreRule

    names: dict[PreRule, list[str]] = {}
    for name, rule in PRE_RULES.items():
        names.setdefault(rule, []).append(name)
    flags = {
        "ignore_merges": "a word that is a token is not split",
        "add_bos": "adds BOS",
        "force_bos": "always adds BOS",
        "escape_spaces": "U+2581 for a space",
    }
    rows = [
        (", ".join(same), ", ".join(text for flag, text in flags.items() if getattr(rule, flag)))
        for rule, same in names.items()
    ]
    return markdown(("tokenizer.ggml.pre", "implies"), rows)
