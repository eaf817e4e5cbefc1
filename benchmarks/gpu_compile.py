"""Compile every GPU kernel with NVRTC for four architectures, without a GPU. Report registers, spills and stack.

    python benchmarks/gpu_compile.py [--only WORDS] [--out LINES.jsonl]

Compiles the kernels of a Llama 3.2 1B (every weight format), of a mixture of experts, and of attention: causal and
bidirectional, with sliding windows, soft caps and sinks. With --only, it compiles only kernels whose names contain
these words. A table per kernel function and compute type goes to results/gpu_compile.csv unless --only is given, and a
line per kernel goes to --out. Exits with 1 if a kernel does not compile or spills more than BUDGET.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.cuda.nvrtc import Nvrtc
from localllm.backends.gpu import cachetypes, formats
from localllm.backends.gpu.kernels import attention, experts, largest, products, recurrence, rowwise, streams
from localllm.backends.gpu.kernels.kernel import Kernel
from localllm.backends.gpu.kernels.products import COLUMNS
from localllm.plan import CacheLayer, Gating

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90")
LOCAL = 48 << 10  # bytes of local memory per work-group, on every GPU
BUDGET = 48  # bytes of stores and loads that a kernel may spill
MOST = ("local_bytes", "registers", "spilled", "stack", "cubin_bytes")  # table columns, as maxima
TABLE = Path(__file__).parent / "results" / "gpu_compile.csv"
LIMITS = Limits(512, 512, 65, 65 * 64)
ROWS = LIMITS.rows
GATES = ("silu(a) * (b)", "gelu(a) * (b)", "sigmoid(a) * (b)", "swiglu_oai(a, b)", "swiglu_clamp(a, b, 7.0f)")
ALONE = ("a", "silu(a)", "gelu(a)", "gelu_erf(a)", "gelu_quick(a)", "sigmoid(a)", "relu2(a)", "signed_root(a)")
ELEMENTS = (*ALONE, *GATES, "softplus(a) * (b)", "(a) + (b)")
BLOCKS = products.block_words(2048)
# The form of a row that a kernel writes: floats, activation blocks, or both.
DELIVERIES = {
    "floats": rowwise.delivered(True, 0), "blocks": rowwise.delivered(False, BLOCKS),
    "both": rowwise.delivered(True, BLOCKS),
}  # fmt: skip
Labelled = tuple[str, Kernel]


def every_kernel(architecture: str) -> list[Labelled]:
    """Return (label, kernel) for every kernel that a plan may need, in the shapes of a 1B model."""
    found: list[Labelled] = []
    for name in formats.FORMATS:
        found += _products(name, architecture)
    for head, group, window, cap, sinks in (
        (64, 4, 0, False, False), (128, 8, 0, False, False), (128, 4, 1024, True, True), (256, 2, 512, True, False),
    ):  # fmt: skip
        found += _attention(CacheLayer(8, head, head), group, CacheTypes(), window, cap, sinks)
    found += _attention(CacheLayer(1, 576, 512), 128, CacheTypes())  # MLA: latent rows as keys and values
    found += _attention(CacheLayer(12, 64, 64), 1, CacheTypes(), 65, causal=False)  # encoders: bidirectional attention
    found += _attention(CacheLayer(4, 256, 256), 2, CacheTypes(), 512, spans=True)  # pictures in Gemma 3
    for name in cachetypes.CACHE:
        found += _cache(name)
    for name in ("f16", "q8_0", "q4_0"):
        found += _sparse(name)
    return [*found, *_rowwise(), *_experts(), *_recurrent()]


def _product(x_stride: int, **given: Any) -> products.Product:
    shape = {
        "K": 2048, "N": 2048, "X_STRIDE": x_stride, "Y_STRIDE": 2048, "RESIDUAL_STRIDE": 2048, "FACTOR": 1.0,
        "COUNT_AT": 0, "HAS_BIAS": True, "HAS_RESIDUAL": True,
    }  # fmt: skip
    return products.Product(**(shape | given))


def _expert_product(x_stride: int) -> products.Product:
    pairs = products.Pairs(EXPERTS=32, PER_ROW=4, HAS_SCALES=True, PAIRS=2048)
    return _product(x_stride, RESIDUAL_STRIDE=0, HAS_RESIDUAL=False, pairs=pairs)


def _head_product(x_head: int) -> products.Product:
    """Return per-head products of slices of 2048 values, for 16 heads."""
    heads = products.Heads(HEADS=16, X_HEAD=x_head)
    plain = {"RESIDUAL_STRIDE": 0, "HAS_BIAS": False, "HAS_RESIDUAL": False}
    return _product(16 * x_head, N=512, Y_STRIDE=16 * 512, heads=heads, **plain)


def _products(name: str, architecture: str) -> list[Labelled]:
    """Return every product kernel for a weight format."""
    width = BLOCKS if name in formats.QUANTIZED else 2048
    own, experts, wide = _product(width), _expert_product(width), width
    found: list[Labelled] = [
        *((f"matvec {name} x {n}", products.Matvec(format=name, COLUMNS=n, product=own)) for n in (1, COLUMNS)),
        *_together(name, width),
        (f"matvec {name}, experts", products.Matvec(format=name, COLUMNS=1, product=experts)),
        (f"matmul {name}", products.Matmul(format=name, product=own)),
        (f"matmul {name}, experts", products.Matmul(format=name, product=experts)),
        (f"matvec {name}, heads", products.Matvec(format=name, COLUMNS=COLUMNS, product=_head_product(width))),
        (f"embed {name}", rowwise.EmbedRows(format=name, MAX_ROWS=ROWS, K=2048, N=32000, Y_STRIDE=2048)),
    ]
    if (terms := products.terms(name, 2048, architecture)) is None:
        return [*found, (f"matmul {name}, heads", products.Matmul(format=name, product=_head_product(width)))]
    if terms:
        stride = terms * 1024 + 4
        own, experts, wide = _product(stride), _expert_product(stride), stride
        split = rowwise.SplitRows(format=name, TERMS=terms, K=2048, X_STRIDE=2048, Y_STRIDE=stride)
        found.append((f"split {name}", split))
    found += [
        (f"tensor {name}, {tile.x} x {tile.w}", products.tensor(name, tile, terms, own))
        for tile in products.tiles_of(name)
    ]
    heads = products.tensor(name, products.tiles_of(name)[0], terms, _head_product(wide))
    tile = products.tensor(name, products.EXPERTS_TILE, terms, experts)
    return [*found, (f"tensor {name}, heads", heads), (f"tensor {name}, experts", tile)]


def _together(name: str, x_stride: int) -> list[Labelled]:
    """Return the kernels that multiply several matrices of a format in one launch."""
    to = DELIVERIES["blocks" if name in formats.QUANTIZED else "floats"]
    product = _product(x_stride, Y_STRIDE=None, HAS_RESIDUAL=None)
    shape: dict[str, Any] = {"format": name, "product": product, "FACTOR1": 1.0}
    found: list[Labelled] = []
    for n in (1, COLUMNS):
        own = products.MatvecTogether(COLUMNS=n, N1=512, N2=512, FACTOR2=1.0, **shape)
        found.append((f"matvec_together {name} x {n}", own))
        for gate in GATES if name == "Q4_K" else GATES[:1]:
            gated = products.Gated(COLUMNS=n, SIZE=products.gated_size(n), OPERATION=gate, delivered=to, **shape)
            found.append((f"matvec_gated {name} x {n}, {gate}", gated))
    return found


def _shape(layer: CacheLayer, group: int, cache: CacheTypes, **given: Any) -> attention.AttentionShape:
    """Return plain causal attention, except for the macros given."""
    heads, flags = layer.kv_heads * group, ("CHUNKED", "HAS_SOFTCAP", "HAS_SINKS", "HAS_SLOPES", "AFTER", "SPANS")
    shape: dict[str, Any] = {
        "MAX_ROWS": ROWS, "PARTITIONS": attention.partitions(LIMITS), "cache": attention.cache_shape(cache, layer),
        "HEADS": heads, "Q_STRIDE": heads * layer.head_dim, "FACTOR": layer.head_dim**-0.5, "WINDOW": 0,
        "CAUSAL": True, "SOFTCAP": 0.0, "REACH": 0, "TABLE_STRIDE_AT": 2,
    }  # fmt: skip
    return attention.AttentionShape(**(shape | dict.fromkeys(flags, False) | given))


def _attention(
    layer: CacheLayer,
    group: int,
    cache: CacheTypes,
    window: int = 0,
    cap: bool = False,
    sinks: bool = False,
    causal: bool = True,
    spans: bool = False,
) -> list[Labelled]:
    shape = _shape(
        layer, group, cache, WINDOW=window, CHUNKED=sinks, CAUSAL=causal, HAS_SOFTCAP=cap, SOFTCAP=50.0,
        HAS_SINKS=sinks, HAS_SLOPES=sinks, SPANS=spans,
    )  # fmt: skip
    label = f"{layer.head_dim} x {group} {cache.keys}" + ", both directions" * (not causal) + ", spans" * spans
    return [
        (f"attend_partition {label}", attention.AttendPartition(shape=shape, GROUPED=attention.grouped(group))),
        *(
            (f"attend_combine {label}, {what}", attention.AttendCombine(shape=shape, delivered=to))
            for what, to in DELIVERIES.items()
        ),
        (f"attend_tile {label}", attention.attend_tile(shape, LOCAL)),
    ]


def _sparse(key_type: str) -> list[Labelled]:
    """Return indexer and attention kernels of DeepSeek 3.2, MiniMax M3 and DeepSeek 4 (sliding window and pools)."""
    cache, found = CacheTypes(key_type, key_type), list[Labelled]()
    near = CacheLayer(1, 512, 512, pooled=True, prefix=True)
    for of, keys, heads, count, block, local in (
        ("positions", CacheLayer(1, 128, 0), 64, 2048, 1, 0), ("blocks", CacheLayer(1, 128, 0), 4, 16, 128, 1),
        ("pools", CacheLayer(1, 128, 0, every=4), 64, 512, 4, 0),
    ):  # fmt: skip
        shape = attention.IndexerShape(
            MAX_ROWS=ROWS, cache=attention.cache_shape(cache, keys), HEADS=heads,
            Q_STRIDE=heads * 128, WEIGHTED=local == 0, COUNT=count, BLOCK=block, LOCAL_BLOCKS=local,
            POOLED=keys.every > 1, POSITIONS=LIMITS.positions,
        )  # fmt: skip
        found += [
            (f"index_scores {of} {key_type}", attention.IndexScores(shape=shape, GROUPED=attention.grouped(heads))),
            (f"select_positions {of} {key_type}", attention.IndexerTopKRows(shape=shape)),
        ]
    for of, layer, group, pools, room, slices in (
        ("positions", CacheLayer(1, 576, 512, selected=2048, prefix=True), 128, None, 2048, 1),
        ("blocks", CacheLayer(4, 128, 128, selected=2048), 16, None, 2048, 4),
        ("pools", near, 64, replace(near, every=4), 2051, 1),
        ("all pools", near, 64, replace(near, every=128), 0, 1),
    ):  # fmt: skip
        far = attention.cache_shape(cache, pools or layer)
        own = _shape(layer, group, cache, WINDOW=128 if pools else 0, HAS_SINKS=pools is not None)
        found.append((f"attend_selected {of} {key_type}", attention.AttendSelected(
            shape=own, GROUPED=attention.grouped(group), SELECTED=room, SLICES=slices,
            POOL=far.EVERY if pools else 0, POOL_ROWS=far.BLOCK_ROWS,
            POOL_KEY_BYTES=far.KEY_BYTES, POOL_VALUE_BYTES=far.VALUE_BYTES,
            ONCE=cachetypes.stored_once(layer, cache),
        )))  # fmt: skip
        if pools:
            found.append((f"append {of} {key_type}", attention.AppendHeads(MAX_ROWS=ROWS, cache=far, SLOTS_AT=2)))
    return found


def _cache(name: str) -> list[Labelled]:
    """Return the kernels that store keys and values of a cache type, and that prepare queries."""
    cache = attention.cache_shape(CacheTypes(name, name), CacheLayer(8, 64, 64))
    shape: dict[str, Any] = {"MAX_ROWS": ROWS, "cache": cache, "SLOTS_AT": 2}
    found: list[Labelled] = [(f"append {name}", attention.AppendHeads(**shape))]
    for label, axes in (("", None), (" on axes", True)):
        rotated = attention.AppendRotated(
            Q_STRIDE=2048, N_ROT=64, NEOX=True, AXES=axes, NORMED=True, EPS=1e-5, **shape
        )  # fmt: skip
        found.append((f"append {name}, rotated{label}", rotated))
    if name == "f16":
        return found
    queries = attention.PrepareQueries(
        HEAD=64,
        HEADS=32,
        Q_STRIDE=2048,
        KEY_TYPE=cache.KEY_TYPE,
        KEY_SIZE=cache.KEY_SIZE,
        KEY_ROTATION=cache.KEY_ROTATION,
    )
    both: list[Labelled] = []
    for head, group in ((64, 4), (128, 8)):
        both += _attention(CacheLayer(8, head, head), group, CacheTypes(name, name))
    return [*found, (f"prepare_queries {name}", queries), *both]


def _rowwise() -> list[Labelled]:
    floats, row = DELIVERIES["floats"], {"WIDTH": 2048, "STRIDE": 2048}
    slices = {"WIDTH": 2048, "X_STRIDE": 3072, "GROUP": 192, "START": 64, "TAKEN": 128}
    sides = {"WIDTH": 2048, "X_STRIDE": 8192, "Y_STRIDE": 8192}
    joined = {"WIDTH": 3072, "A_STRIDE": 2048, "B_STRIDE": 1024, "OF_A": 128, "OF_B": 64}
    capped = rowwise.Elements(
        OPERATION="FACTOR * hyperbolic_tangent((a) / FACTOR)", delivered=floats, FACTOR=30.0, **row
    )
    gate = rowwise.Elements(OPERATION="sigmoid(a) * (b)", delivered=floats, SLICE=2048, **row)
    xielu = rowwise.Elements(
        OPERATION="xielu(a, FACTOR, FACTOR1, FACTOR2, FACTOR3)", delivered=floats, FACTOR=0.8, FACTOR1=0.8,
        FACTOR2=0.5, FACTOR3=-1e-6, **row,
    )  # fmt: skip
    positions = rowwise.EmbedRows(format="F16", MAX_ROWS=ROWS, K=2048, N=1024, Y_STRIDE=2048, BY_POSITION=True)
    connected = streams.HyperConnectionStreams(
        SLICES=4, PARTS=3, X_STRIDE=24, Y_STRIDE=24, EPS=1e-6, MAGNITUDE=2.0, WRITTEN_EPS=0.0, ITERATIONS=20
    )
    found: list[Labelled] = [
        ("elements xielu", xielu), ("embed positions", positions), ("elements cap", capped), ("elements gate", gate),
        ("mix", streams.MixSlices(SLICES=4, C_STRIDE=16, HAS_BASE=True, **sides)),
        ("blend", streams.BlendSlices(SLICES=8, L_STRIDE=2048, EPS=1e-5, **sides)),
        ("connect", connected),
        ("match", streams.MatchSlices(L_WIDTH=2048, EPS=1e-5, **sides)),
        ("excess", streams.GaussianTopKRows(FACTOR=1.6, **sides)),
        *(
            (f"largest, pass {n + 1}", largest.TopKLogits(PASS=n, SORTED=largest.SORTED, STRIDE=128256))
            for n in range(2)
        ),
    ]  # fmt: skip
    for what, to in DELIVERIES.items():
        found += [(f"elements {a}, {what}", rowwise.Elements(OPERATION=a, delivered=to, **row)) for a in ELEMENTS]
        found.append((f"weigh, {what}", streams.MulRows(delivered=to, **sides)))
        found.append((f"columns, {what}", rowwise.SliceColumns(delivered=to, **slices)))
        found.append((f"join, {what}", rowwise.ConcatColumns(delivered=to, **joined)))
        found.append((f"select_rows, {what}", rowwise.Select(MAX_ROWS=ROWS, delivered=to, **row)))
        found += [(f"norm {layer}, {what}", _norm(2048, layer, to)) for layer in (False, True)]
        for add in (False, True):
            spliced = rowwise.SpliceRows(MAX_ROWS=ROWS, MEDIA_STRIDE=2048, START=0, ADD=add, delivered=to, **row)
            found.append((f"splice {add}, {what}", spliced))
    for style in (False, True):
        for label, axes in (("", None), (" on axes", True)):
            turned = rowwise.RotateHeads(MAX_ROWS=ROWS, HEAD=64, N_ROT=64, NEOX=style, AXES=axes, **row)
            found.append((f"rotate {style}{label}", turned))
        found.append((f"norm {style} of heads", _norm(128, style, floats)))
    return found


def _norm(width: int, layer: bool, to: rowwise.Delivered) -> Kernel:
    return rowwise.NormRows(
        SIZE=rowwise.norm_size(width), K=width, X_STRIDE=2048, Y_STRIDE=2048, LAYER=layer, EPS=1e-5, HAS_BIAS=layer,
        GROUP_STRIDE=0, delivered=to,
    )  # fmt: skip


def _experts() -> list[Labelled]:
    routes = [
        experts.Route(
            EXPERTS=128,
            USED=8,
            STRIDE=128,
            GATING=n,
            NORMALIZE=True,
            FACTOR=1.0,
            HAS_BIAS=True,
            EXPERT_GROUPS=8,
            GROUPS_USED=4,
        )
        for n in range(len(get_args(Gating)))
    ]
    return [
        ("combine", experts.CombineExperts(WIDTH=2048, STRIDE=2048, USED=4)),
        ("group_pairs", experts.GroupPairs(EXPERTS=128, USED=8, PAIRS=4096, TILE=32, COUNT_AT=0)),
        *((f"route {gating}", kernel) for gating, kernel in enumerate(routes)),
    ]


def _recurrent() -> list[Labelled]:
    """Return the kernels of Qwen 3.5 9B (convolution and states), Granite 4 H Tiny (Mamba-2), and Mamba-1."""
    stored = recurrence.Stored(MAX_ROWS=ROWS, SLOTS_AT=6, TABLE_STRIDE_AT=3)
    strides = {f"{each}_STRIDE": 8192 for each in "QKVGBY"}
    found: list[Labelled] = [
        ("convolve", recurrence.Convolve(
            stored=stored, WIDTH=8192, SIZE=4, X_STRIDE=8192, Y_STRIDE=8192, HAS_BIAS=True
        )),
        ("selective_scan", recurrence.SelectiveScan(
            stored=stored, WIDTH=4096, STATE_DIM=16, X_STRIDE=4096, DT_STRIDE=4096, B_STRIDE=16, C_STRIDE=16,
            Y_STRIDE=4096,
        )),
    ]  # fmt: skip
    for width, pools, size in ((1024, 2, 4), (512, 1, 128)):  # DeepSeek 4
        pool = recurrence.PoolRows(stored=stored, WIDTH=512, PARTS=pools, SIZE=size, Y_STRIDE=512)
        append_rows = recurrence.AppendPooled(stored=stored, WIDTH=width, X_STRIDE=width, S_STRIDE=width)
        found += [(f"append_pooled {size}", append_rows), (f"pool_rows {size}", pool)]
    for erases in (False, True):  # RWKV-6 and RWKV-7 of width 2560
        found.append((f"matrix_scan{' erases' * erases}", recurrence.WkvRows(
            stored=stored, HEADS=40, KEY_DIM=64, VALUE_DIM=64, ERASES=erases, BEFORE=not erases, K_STRIDE=2560,
            V_STRIDE=2560,
        )))  # fmt: skip
    for delta, decays, sizes in (
        (True, 1, (32, 16, 128, 128)),
        (False, 1, (48, 1, 128, 64)),
        (True, 128, (32, 32, 128, 128)),
    ):
        shape = dict(zip(("HEADS", "KEY_HEADS", "KEY_DIM", "VALUE_DIM"), sizes, strict=True))
        heads = recurrence.LinearHeads(**shape, DECAYS=decays)
        append = recurrence.AppendKeys(stored=stored, heads=heads, K_STRIDE=8192)
        kind = recurrence.LinearAttention if decays == 1 else recurrence.ChannelAttention
        attend = kind(
            stored=stored, heads=heads, DELTA=delta, TILED=delta, HAS_SKIP=not delta, HAS_STEPS=True,
            HAS_STRENGTHS=True, **strides,
        )  # fmt: skip
        found += [(f"append_keys {sizes}", append), (f"{kind.name} {sizes}", attend)]
    return found


def report(nvrtc: Nvrtc, architecture: str, label: str, kernel: Kernel) -> dict[str, Any]:
    """Return a report line. If compiling fails, `error` holds the compiler's message."""
    start = perf_counter()
    line: dict[str, Any] = {"kernel": label, "function": kernel.name, "architecture": architecture}
    line |= {"nvrtc": nvrtc.version, "local_bytes": kernel.local_bytes}
    try:
        made = nvrtc.compile(kernel.source(generic=False), kernel.name, architecture)
    except BackendError as error:
        return {**line, "error": str(error)}
    return {
        **line, "registers": made.registers, "spilled": made.spilled, "stack": made.stack,
        "cubin_bytes": len(made.cubin), "seconds": round(perf_counter() - start, 3),
    }  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table: a row per kernel function and compute type, with the largest values over its variants."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["function"], line["architecture"]), []).append(line)
    rows = [("function", "architecture", "variants", "refused", *MOST)]
    for (function, architecture), group in sorted(groups.items()):
        compiled = [line for line in group if "error" not in line]
        most = [max((line[name] for line in compiled), default=0) for name in MOST]
        rows.append((function, architecture, *map(str, (len(group), len(group) - len(compiled), *most))))
    return "".join(",".join(row) + "\n" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write a line per kernel")
    parser.add_argument("--only", default="", help="words in the names of kernels")
    arguments = parser.parse_args()
    out, only = arguments.out, arguments.only
    nvrtc = Nvrtc()
    lines = []
    for architecture in ARCHITECTURES:
        kernels = [(label, kernel) for label, kernel in every_kernel(architecture) if only in label]
        mine = [report(nvrtc, architecture, label, kernel) for label, kernel in kernels]
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
    if out is not None:
        out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if not only:
        TABLE.write_text(table(lines), encoding="utf-8")
    return int(any("error" in line or line["spilled"] > BUDGET for line in lines))


if __name__ == "__main__":
    sys.exit(main())
