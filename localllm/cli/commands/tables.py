"""The support matrix as text, made from the program's own tables; `localllm show` prints it."""

from __future__ import annotations

from localllm.cli.terminal.formatting import markdown

INTEGERS = ("I8", "I16", "I32", "I64")  # formats that files hold but weights never use


def formats() -> str:
    """Return the table of weight formats: bits per weight, and whether each can be read, written and run."""
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
    header = ("format", "bits a weight", "block", "read", "write", "cpu kernels")
    return markdown(header, rows, right=("bits a weight",))


def architectures() -> str:
    """Return the table of architectures, with the properties that a model file does not hold."""
    from localllm.models import ARCHITECTURES

    rows = []
    for each in ARCHITECTURES.values():
        rope = {"norm": "neighbours", "neox": "halves", None: ""}[each.rope_style]
        if each.no_rope_every:
            rope += f", every {each.no_rope_every}th layer none"
        norms = {"rms": "RMS", "layer": "layer"}[each.norm] + (", q and k" if each.qk_norm else "")
        rows.append(
            (
                each.name,
                f"{each.ffn}, {each.activation}",
                norms,
                rope,
                each.routing.gating.replace("_", " ") if each.routing else "",
                "yes" if each.sliding else "",
            )
        )
    header = ("architecture", "feed-forward", "norms", "rotated dimensions", "experts chosen by", "sliding window")
    return markdown(header, rows)
