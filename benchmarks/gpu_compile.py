"""Compiles every GPU kernel by NVRTC for four compute types, without a card: registers, spills and stack of each.

    python benchmarks/gpu_compile.py [--out benchmarks/results/gpu_compile.jsonl]

Compiles the kernels of a Llama 3.2 1B (every weight format), of a mixture of experts, and of attention with windows,
soft caps and sinks. Writes a line per kernel and compute type. Exits with 1 if one does not compile or spills more than
BUDGET.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.cuda.nvrtc import Nvrtc
from localllm.backends.gpu import cachetypes, formats, kernels, products
from localllm.backends.gpu.kernels import Kernel
from localllm.plan import CacheLayer

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90")
BUDGET = 32  # bytes that a kernel may spill, stored and loaded
LIMITS = Limits(512, 512, 65, 65 * 64)
GATES = ("silu(a) * (b)", "gelu(a) * (b)", "sigmoid(a) * (b)", "swiglu_oai(a, b)")
ELEMENTS = ("a", "silu(a)", "gelu(a)", "sigmoid(a)", *GATES, "(a) + (b)")
BLOCKS = products.block_words(2048)
# The form of a row that a kernel makes: floats, activation blocks, or both.
DELIVERIES = {
    "floats": kernels.delivered(True, 0), "blocks": kernels.delivered(False, BLOCKS),
    "both": kernels.delivered(True, BLOCKS),
}  # fmt: skip


def every_kernel(architecture: str) -> list[tuple[str, Kernel]]:
    """(description, kernel): all kernels that a plan may need, in the shapes of a 1B model."""
    found: list[tuple[str, Kernel]] = []
    for name in formats.FORMATS:
        width = BLOCKS if name in formats.QUANTIZED else 2048
        shape = {
            "K": 2048, "N": 2048, "X_STRIDE": width, "Y_STRIDE": 2048, "RESIDUAL_STRIDE": 2048, "COUNT_AT": 0,
            "FACTOR": 1.0, "HAS_BIAS": True, "HAS_RESIDUAL": True,
        }  # fmt: skip
        experts = {**shape, "EXPERTS": 32, "PER_ROW": 4, "HAS_SCALES": True}
        found += [
            (f"matvec {name} x 1", kernels.matvec(name, 1, shape)),
            (f"matvec {name} x {kernels.COLUMNS}", kernels.matvec(name, kernels.COLUMNS, shape)),
            *_together(name, shape),
            (f"matvec {name}, experts", kernels.matvec(name, 1, experts)),
            (f"matmul {name}", kernels.matmul(name, shape)),
            (f"matmul {name}, experts", kernels.matmul(name, {**experts, "PAIRS": 2048})),
            (f"embed {name}", kernels.embed(name, LIMITS, {"K": 2048, "N": 32000, "Y_STRIDE": 2048})),
        ]
        if (terms := products.terms(name, 2048, architecture)) is None:
            continue
        if terms:
            stride = {"X_STRIDE": terms * 1024 + 4}
            shape, experts = {**shape, **stride}, {**experts, **stride}
            found.append(
                (f"split {name}", kernels.split(name, terms, {"K": 2048, "X_STRIDE": 2048, "Y_STRIDE": width}))
            )
        found += [
            (f"tensor {name}, {tile.x} x {tile.w}", kernels.tensor(name, tile, terms, shape))
            for tile in products.tiles_of(name)
        ]
        experts["PAIRS"] = 2048
        found.append((f"tensor {name}, experts", kernels.tensor(name, products.EXPERTS_TILE, terms, experts)))
    for head, group, window, cap, sinks in (
        (64, 4, 0, False, False), (128, 8, 0, False, False), (128, 4, 1024, True, True), (256, 2, 512, True, False),
    ):  # fmt: skip
        found += _attention(head, group, CacheTypes(), window, cap, sinks)
    for name in cachetypes.CACHE:
        if name != "f16":
            shape = {**_cache(CacheTypes(name, name), 64), "HEADS": 32, "Q_STRIDE": 2048}
            found.append((f"prepare_queries {name}", kernels.prepare_queries(shape)))
            found += _attention(64, 4, CacheTypes(name, name)) + _attention(128, 8, CacheTypes(name, name))
    row: dict[str, Any] = {"WIDTH": 2048, "STRIDE": 2048}
    floats = {**row, **DELIVERIES["floats"]}
    found += [
        *(
            (f"elements {a}, {what}", kernels.elements(a, {**row, **told}))
            for a in ELEMENTS
            for what, told in DELIVERIES.items()
        ),
        ("elements cap", kernels.elements("FACTOR * hyperbolic_tangent((a) / FACTOR)", {**floats, "FACTOR": 30.0})),
        ("elements gate", kernels.elements("sigmoid(a) * (b)", {**floats, "GATE_STRIDE": 1})),
        *((f"select_rows, {what}", kernels.select_rows(LIMITS, {**row, **told})) for what, told in DELIVERIES.items()),
        *((f"largest, pass {n + 1}", kernels.largest(n, {"STRIDE": 128256})) for n in range(2)),
        ("combine", kernels.combine({**row, "USED": 4})),
        ("group_pairs", kernels.group_pairs(128, {"USED": 8, "PAIRS": 4096, "TILE": 32, "COUNT_AT": 0})),
    ]
    for name in cachetypes.CACHE:
        shape = {**_cache(CacheTypes(name, name), 64), "STRIDE": 512, "SLOTS_AT": 2}
        turned = {**shape, "ROTATED": True, "NORMED": True, "EPS": 1e-5, "Q_STRIDE": 2048, "N_ROT": 64, "NEOX": True}
        found.append((f"append {name}", kernels.append(LIMITS, {**shape, "ROTATED": False})))
        found.append((f"append {name}, rotated", kernels.append(LIMITS, turned)))
    for style in (False, True):
        found.append((f"rotate {style}", kernels.rotate(LIMITS, {**row, "HEAD": 64, "N_ROT": 64, "NEOX": style})))
        shape = {"K": 2048, "X_STRIDE": 2048, "Y_STRIDE": 2048, "LAYER": style, "EPS": 1e-5, "HAS_BIAS": style}
        for what, told in DELIVERIES.items():
            found.append((f"norm {style}, {what}", kernels.norm({**shape, "GROUP_STRIDE": 0, **told})))
        shape |= {"K": 128, "GROUP_STRIDE": 0, **DELIVERIES["floats"]}
        found.append((f"norm {style} of heads", kernels.norm(shape)))
    for gating in range(3):
        shape = {"STRIDE": 128, "GATING": gating, "NORMALIZE": True, "FACTOR": 1.0, "HAS_BIAS": True}
        found.append((f"route {gating}", kernels.route(128, 8, shape)))
    return found


def _together(name: str, shape: dict[str, Any]) -> list[tuple[str, Kernel]]:
    """The launch of several matrices of one format."""
    own = {key: value for key, value in shape.items() if key not in ("Y_STRIDE", "HAS_RESIDUAL")}
    third, gates = {**own, "N1": 512, "N2": 512, "FACTOR1": 1.0, "FACTOR2": 1.0}, GATES if name == "Q4_K" else GATES[:1]
    gated = {**own, "FACTOR1": 1.0, **DELIVERIES["blocks" if name in formats.QUANTIZED else "floats"]}
    return [
        line
        for columns in (1, kernels.COLUMNS)
        for line in (
            (f"matvec_together {name} x {columns}", kernels.together(name, columns, third)),
            *((f"matvec_gated {name} x {columns}, {g}", kernels.gated(name, columns, g, gated)) for g in gates),
        )
    ]


def _cache(cache: CacheTypes, head: int) -> dict[str, Any]:
    return cachetypes.constants(cache, CacheLayer(8, head))


def _attention(
    head: int, group: int, cache: CacheTypes, window: int = 0, cap: bool = False, sinks: bool = False
) -> list[tuple[str, Kernel]]:
    shape = {
        **_cache(cache, head), "HEADS": 8 * group, "Q_STRIDE": 8 * group * head, "FACTOR": head**-0.5,
        "WINDOW": window, "HAS_SOFTCAP": cap, "SOFTCAP": 50.0, "HAS_SINKS": sinks, "TABLE_STRIDE_AT": 2,
    }  # fmt: skip
    label = f"{head} x {group} {cache.keys}"
    return [
        (f"attend_partition {label}", kernels.attention("attend_partition", LIMITS, shape)),
        *(
            (f"attend_combine {label}, {what}", kernels.attention("attend_combine", LIMITS, {**shape, **told}))
            for what, told in DELIVERIES.items()
        ),
        (f"attend_tile {label}", kernels.attention("attend_tile", LIMITS, shape)),
    ]


def report(nvrtc: Nvrtc, architecture: str, label: str, kernel: Kernel) -> dict[str, Any]:
    """A line of the report; `error` holds the compiler's message if it fails."""
    start = perf_counter()
    line = {"kernel": label, "architecture": architecture, "nvrtc": nvrtc.version, "local_bytes": kernel.local_bytes}
    try:
        made = nvrtc.compile(kernel.source(generic=False), kernel.name, architecture)
    except BackendError as error:
        return {**line, "error": str(error)}
    return {
        **line, "registers": made.registers, "spilled": made.spilled, "stack": made.stack,
        "cubin_bytes": len(made.cubin), "seconds": round(perf_counter() - start, 3),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_compile.jsonl")
    out = parser.parse_args().out
    nvrtc = Nvrtc()
    lines = []
    for architecture in ARCHITECTURES:
        mine = [report(nvrtc, architecture, label, kernel) for label, kernel in every_kernel(architecture)]
        bad = [line for line in mine if "error" in line or line["spilled"] > BUDGET]
        good = [line for line in mine if "error" not in line]
        most = max(good, key=lambda line: line["registers"], default={"registers": 0, "kernel": ""})
        print(
            f"{architecture}: {len(good)} of {len(mine)} kernels compile, {len(bad)} fail or spill; most registers "
            f"{most['registers']} ({most['kernel']}), largest stack {max((x['stack'] for x in good), default=0)} bytes"
        )
        for line in bad:
            print(f"  {line['kernel']}: {line.get('error', '')[:600] or str(line['spilled']) + ' bytes spilled'}")
        lines += mine
    out.parent.mkdir(exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return int(any("error" in line or line["spilled"] > BUDGET for line in lines))


if __name__ == "__main__":
    sys.exit(main())
