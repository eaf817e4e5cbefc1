"""Logits are bitwise identical on every instruction set that this machine can run.

Generated code is also inspected for instruction sets that this machine cannot run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from localllm.backends.base import CacheTypes
from localllm.backends.cpu import isa, jit
from localllm.backends.cpu.arguments import Address, Int64, Rows, Struct
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.isa import Isa
from localllm.backends.cpu.jit import Kernel
from localllm.backends.cpu.kernels import linear, wide
from localllm.backends.cpu.kernels.common import kernel
from localllm.backends.cpu.panels import LINE
from localllm.backends.cpu.unpack import INTEGER_PANELS
from localllm.plan import Plan, Recorder, RopeStyle, Value
from tests.backends.cases import linear_attention, turned_ends
from tests.backends.selecting import (
    POOLING,
    SELECTING,
    Pooling,
    Selecting,
    attend_pools,
    attend_selected,
    rows_of,
)
from tests.backends.support import Shape, bind, feed, plan, record, stored, tokens
from tests.models.support import MemoryWeight

HOST = {name for name, on in llvm.get_host_cpu_features().items() if on}
# All required weight formats in one model, with every feature of a dense architecture.
MIXED = Shape("qwen3", width=96, ffn=64, heads=6, kv_heads=2, head_dim=20, biased=True)
MIX = {
    "token_embd": "Q4_0", "output": "Q8_0", "attn_q": "Q8_0", "attn_k": "F16", "attn_v": "Q4_0", "attn_output": "F32",
    "ffn_gate": "Q4_0", "ffn_up": "BF16", "ffn_down": "Q8_0",
}  # fmt: skip


def mixed_plan() -> Plan:
    return plan(lambda name: MIX[name.split(".")[-2]], MIXED)


def digest(backend: CpuBackend, plan: Plan) -> str:
    """Return the digest of the logits of 90 tokens: 80 in one batch, then one at a time."""
    return hashlib.sha256(feed(bind(backend, plan), tokens(90), [80, *[1] * 10]).tobytes()).hexdigest()


def needs(name: str) -> Isa:
    """Return the instruction set with this name. Skip the test if this machine cannot execute it."""
    row = isa.X86_ROWS.get(name)
    if sys.platform == "win32" or "sse2" not in HOST or (row is not None and not HOST.issuperset(row[0])):
        pytest.skip(f"this processor does not run {name}")
    return isa.isa_named(name)


@pytest.mark.parametrize("name", ["avx512-vnni", "avx-vnni", "avx2", "generic"])
def test_a_model_has_the_same_bits(cpu: CpuBackend, name: str) -> None:
    backend = CpuBackend(2, needs(name))
    assert backend.isa.name == name
    assert digest(backend, mixed_plan()) == digest(cpu, mixed_plan())
    backend.close()


@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_decays_by_channel_have_the_same_bits(cpu: CpuBackend, name: str) -> None:
    build = linear_attention(2, 2, 24, 40, delta=True, tiled=False, channels=True)
    layer, backend = record(stored("t", "F32", (97, 48)), build), CpuBackend(2, needs(name))
    assert digest(backend, layer) == digest(cpu, layer)
    backend.close()


@pytest.mark.parametrize("style", ["interleaved", "neox"])
@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_ends_of_heads_that_are_rotated_have_the_same_bits(cpu: CpuBackend, name: str, style: RopeStyle) -> None:
    plan = record(stored("t", "F32", (97, 126)), lambda r, x: turned_ends(r, x, style, 42, 8, again=True))
    backend = CpuBackend(2, needs(name))
    assert digest(backend, plan) == digest(cpu, plan)
    backend.close()


SELECTED = (  # keys gathered or read in place; values that are a prefix of the keys; query heads split into groups
    (SELECTING[0], "own", CacheTypes("f16", "bf16")),
    (SELECTING[0], "own", CacheTypes("q8_0", "q5_1")),
    (SELECTING[6], "own", CacheTypes("f16", "f16")),
    (SELECTING[1], "prefix", CacheTypes("q8_0", "q8_0")),
    (SELECTING[9], "own", CacheTypes("f16", "q8_0")),
)


@pytest.mark.parametrize(("s", "values", "cache"), SELECTED, ids=str)
@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_what_an_indexer_selects_has_the_same_bits(
    cpu: CpuBackend, name: str, s: Selecting, values: str, cache: CacheTypes
) -> None:
    """In the prompt each token selects keys separately. In decode steps, one token's work is shared between threads."""
    plan = record(MemoryWeight.of("t", rows_of(s, 97)), attend_selected(s, values))
    backend = CpuBackend(2, needs(name))
    ours, theirs = (feed(bind(b, plan, cache=cache), tokens(90), [80, *[1] * 10]) for b in (backend, cpu))
    np.testing.assert_array_equal(ours, theirs)
    backend.close()


@pytest.mark.parametrize("cache", [CacheTypes("f16", "bf16"), CacheTypes("q8_0", "q5_1")], ids=str)
@pytest.mark.parametrize("p", [POOLING[0], POOLING[7]], ids=str)
@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_pools_have_the_same_bits(cpu: CpuBackend, name: str, p: Pooling, cache: CacheTypes) -> None:
    plan = record(MemoryWeight.of("t", rows_of(p, 97)), attend_pools(p))
    backend = CpuBackend(2, needs(name))
    ours, theirs = (feed(bind(b, plan, cache=cache), tokens(90), [80, *[1] * 10]) for b in (backend, cpu))
    np.testing.assert_array_equal(ours, theirs)
    backend.close()


# One format per way of unpacking and summing: with minimums, from a table, from a codebook; with integer scales and an
# offset, with minimums, with scales that fit into the bytes, with bytes of any size.
UNPACKED = ["Q4_1", "Q8_0", "IQ4_NL", "IQ2_S", "Q6_K", "Q4_K", "Q3_K", "IQ4_XS"]
EXTRA = [("avx2", format) for format in UNPACKED] + [
    ("generic", "Q4_1"),
    ("generic", "Q5_0"),
]  # the other formats take long to compile


@pytest.mark.parametrize(("name", "format"), EXTRA)
def test_a_format_has_the_same_bits(cpu: CpuBackend, name: str, format: str) -> None:
    """The plan includes the embedding, and evaluates few tokens and many, in tiles of every size."""
    width = INTEGER_PANELS[format].block_values * (2 if INTEGER_PANELS[format].block_values == 256 else 4)
    weight, table = stored("w", format, (50, width)), stored("t", format, (97, width))
    matrix = record(table, lambda r, x: r.linear(x, weight))
    backend = CpuBackend(2, needs(name))
    for sizes in ([], [1, 2, 3]):
        ours, theirs = (feed(bind(b, matrix), tokens(21), sizes) for b in (backend, cpu))
        np.testing.assert_array_equal(ours, theirs)
    backend.close()


@pytest.mark.parametrize("name", ["avx512-vnni", "avx2", "generic"])
@pytest.mark.parametrize("columns", [64, 257])
def test_bfloats_have_the_same_bits(cpu: CpuBackend, name: str, columns: int) -> None:
    """A pair of BF16 products takes one instruction, two fused multiply-adds, or software. The bits are always the
    same.
    """
    random = np.random.RandomState(columns)
    weight, table = (
        MemoryWeight.of(what, random.standard_normal((97, columns)) * 2.0 ** random.uniform(-30, 30, columns), format)
        for what, format in (("w", "BF16"), ("t", "F32"))
    )
    matrix = record(table, lambda r, x: r.linear(x, weight))
    backend = CpuBackend(2, needs(name))
    assert not backend.isa.bfloat_dot
    for sizes in ([], [1, 2, 3]):
        ours, theirs = (feed(bind(b, matrix), tokens(20), sizes) for b in (backend, cpu))
        np.testing.assert_array_equal(ours, theirs)
    backend.close()


def attention_with_everything(r: Recorder, x: Value) -> Value:
    sinks = MemoryWeight.of("sinks", np.array([0.5, -1.0, 2.0, 0.0]))
    q = r.linear(x, stored("q", "F16", (64, 48)))
    r.append(r.linear(x, stored("k", "F16", (32, 48))), r.linear(x, stored("v", "F16", (32, 48))), 2)
    mixed = r.attention(q, 0, 4, 0.25, window=11, softcap=3.0, sinks=sinks)
    return r.softcap(r.glu(mixed, r.activate(mixed, "gelu"), "swiglu_oai"), 4.0)


@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_what_newer_models_use_has_the_same_bits(cpu: CpuBackend, name: str) -> None:
    """Sliding windows, soft caps, attention sinks, gates and layer norms give the same bits on every
    instruction set. So do float16 values of every magnitude, which the generic instruction set converts in
    software.
    """
    sizes = 10.0 ** np.random.RandomState(4).uniform(-9, 4, (97, 1))
    values = np.random.RandomState(3).standard_normal((97, 48)) * sizes
    table, weight = MemoryWeight.of("t", values), MemoryWeight.of("w", values[0] + 1.0)
    plan = record(table, lambda r, x: attention_with_everything(r, x))
    normed = record(table, lambda r, x: r.layer_norm(x, weight, weight, 1e-5, 1))
    backend = CpuBackend(2, needs(name))
    for one in (plan, normed):
        ours, theirs = (feed(bind(b, one), tokens(60), [1, 30]) for b in (backend, cpu))
        np.testing.assert_array_equal(ours, theirs)
    backend.close()


CHILD = """
from localllm.backends.cpu.backend import CpuBackend
from tests.backends.cpu.test_instruction_sets import digest, mixed_plan
backend = CpuBackend(2)
print(backend.isa.name, digest(backend, mixed_plan()))
backend.close()
"""


@pytest.mark.parametrize(("cpu_name", "name"), [("haswell", "avx2"), ("x86-64", "generic")])
def test_numba_cpu_name_chooses_the_row(cpu: CpuBackend, cpu_name: str, name: str) -> None:
    """NUMBA_CPU_NAME selects the instruction set of a process, as it does for Numba. The logits stay the same."""
    needs(name)
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={k: v for k, v in os.environ.items() if k != "NUMBA_CPU_FEATURES"} | {"NUMBA_CPU_NAME": cpu_name},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == [name, digest(cpu, mixed_plan())]


@pytest.mark.parametrize(
    ("cpu_name", "features", "name"),
    [
        ("generic", None, "generic"),
        ("cascadelake", None, "avx512-vnni"),
        ("never heard of", None, "generic"),
        ("generic", "+avx2,+fma,+f16c,-avx512f", "avx2"),
        ("haswell", "", "generic"),
        ("haswell", "-avx2", "generic"),
    ],
)
def test_features_given_beat_those_of_the_name(
    monkeypatch: pytest.MonkeyPatch, cpu_name: str, features: str | None, name: str
) -> None:
    needs("generic")
    monkeypatch.setenv("NUMBA_CPU_NAME", cpu_name)
    if features is None:
        monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    else:
        monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert (isa.host().name, isa.host().cpu) == (name, cpu_name)


def test_features_decide_and_a_missing_one_falls_back() -> None:
    full = dict.fromkeys(isa.X86_ROWS["avx512-vnni"][0], True) | {"avx2": True}
    assert isa.for_cpu("any", full, "x86_64").name == "avx512-vnni"
    for gone, left in (("avx512vnni", "avx2"), ("f16c", "generic"), ("fma", "generic")):
        assert isa.for_cpu("any", full | {gone: False}, "x86_64").name == left
    assert isa.for_cpu("any", full | {"avx512vl": False, "avxvnni": True}, "x86_64").name == "avx-vnni"
    assert isa.for_cpu("any", {"dotprod": True}, "aarch64").name == "arm-dotprod"
    assert isa.for_cpu("any", {}, "aarch64").name == "arm"
    with pytest.raises(ValueError, match="avx-vnni, avx2, arm-dotprod, generic"):
        isa.isa_named("mmx")


# -- code generation -------------------------------------------------------------------------------------------------

INSTRUCTIONS = {  # instruction set -> required instructions of the dot product, in AT&T or Arm syntax
    "avx512-vnni": r"vpdpbusd\s.*%zmm",
    "avx-vnni": r"\{vex\}\s+vpdpbusd\s.*%ymm",
    "avx2": r"vpmaddubsw\s.*%ymm",
    "arm-dotprod": r"\bsdot\s+v\d+\.4s",
    "generic": r"$^",
}
ANY_DOT = r"vpdpbusd|vpdpwssd|vpmaddubsw|pmaddubsw|\b[su]s?dot\b"
# Stack accesses per dot product in the loop over blocks, which show register spills. With 32 registers, the
# sums, bytes, scales and activations of two panels fit. On Arm the registers are a quarter as wide, and all
# but a few scales fit. AVX2 has 16 registers of half the width, and may access the stack once per two
# products of three instructions each.
STACK = {"avx512-vnni": 0.0, "avx-vnni": 0.0, "avx2": 0.6, "arm-dotprod": 0.2}


def assembly(kernel: Kernel, row: isa.Isa) -> str:
    """Return the assembly of a kernel for an instruction set."""
    if not row.triple and not row.name.startswith("arm") and "sse2" not in HOST:
        pytest.skip("LLVM aborts if it must write x86 instructions for another kind of processor")
    return jit.assembly(kernel, row)


def mat_mul(format: str, rows: int = 1) -> Kernel:
    """Return a kernel that multiplies a matrix with packed bytes by `rows` vectors, in one pass."""
    panel = INTEGER_PANELS[format]

    def body(f, a, thread, threads) -> None:  # type: ignore[no-untyped-def]
        operands = linear.Operands(a.weights, a.x.row, a.y.row, a.scale, a.bias)
        linear.direct_pass(f, a, panel, operands, f.i64(0), rows, f.i64(0), a.panels)

    return kernel(f"mat_mul_{format}_{rows}", linear.LinearArguments, body)


@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
def test_the_instructions_are_those_of_the_row(name: str, format: str) -> None:
    text = assembly(mat_mul(format), isa.isa_named(name))
    wanted = re.findall(INSTRUCTIONS[name], text)
    every = re.findall(ANY_DOT, text)
    assert bool(wanted) == (name != "generic")
    assert len(every) == len(wanted), "dot products in another form or width"


@pytest.mark.parametrize("name", STACK)
@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
def test_the_mat_vec_keeps_its_sums_in_registers(name: str, format: str) -> None:
    text = assembly(mat_mul(format), isa.isa_named(name))
    loops = [block for block in re.split(r"^\.?\w+:.*$", text, flags=re.MULTILINE) if re.search(ANY_DOT, block)]
    assert len(loops) == 1, "one loop over blocks, unrolled along the block"
    dots = len(re.findall(ANY_DOT, loops[0]))
    stack = len(re.findall(r"\(%(?:rsp|rbp)\)|\[(?:sp|x29)\b", loops[0]))
    assert dots >= 8
    assert stack <= STACK[name] * dots


# Rows in one pass, and stack accesses per dot product that are still allowed. The float32 sums of super-blocks change
# once per 64 products, so the compiler may keep them in memory.
PASSES = {"Q4_0": (8, 0.04), "Q8_0": (8, 0.04), "Q4_K": (4, 0.1), "Q5_K": (6, 0.2), "Q6_K": (6, 0.2)}


@pytest.mark.parametrize("format", PASSES)
def test_a_pass_of_several_rows_keeps_its_sums_in_registers(format: str) -> None:
    rows, allowed = PASSES[format]
    row = isa.isa_named("avx512-vnni")
    assert linear.rows_per_pass(row, INTEGER_PANELS[format]) >= rows
    text = assembly(mat_mul(format, rows), row)
    loop = max(re.split(r"^\.?\w+:.*$", text, flags=re.MULTILINE), key=lambda block: len(re.findall(ANY_DOT, block)))
    dots = len(re.findall("vpdpbusd", loop))
    assert dots == rows * INTEGER_PANELS[format].block_values // 4
    assert len(re.findall(r"\(%(?:rsp|rbp)\)", loop)) <= allowed * dots


ZEN4 = isa.for_cpu("znver4", dict.fromkeys(isa.KNOWN_CPUS["znver4"], True), "x86_64")


@pytest.mark.parametrize(
    ("format", "rows", "every"),
    [
        ("IQ3_XXS", 1, 0),
        ("Q4_0", 1, 0),
        ("Q4_0", 2, 9),
        ("Q4_0", 3, 1),
        ("Q6_K", 2, 9),
        ("Q6_K", 3, 1),
        ("Q8_0", 4, 9),
        ("Q8_0", 5, 1),
    ],
)
def test_on_zen_passes_of_few_rows_prefetch_few_lines(format: str, rows: int, every: int) -> None:
    text = assembly(mat_mul(format, rows), ZEN4)
    panel = INTEGER_PANELS[format]
    lines = -(-panel.block_bytes // LINE)
    assert text.count("prefetcht1") == (pytest.approx(lines / every, abs=1) if every else 0)
    assert "prefetcht0" not in text


ZEN3 = isa.for_cpu("znver3", dict.fromkeys(isa.KNOWN_CPUS["znver3"], True), "x86_64")


@pytest.mark.parametrize(
    ("format", "rows", "all_lines"), [("Q8_0", 1, 0), ("Q8_0", 2, 1), ("Q4_K", 2, 1), ("Q6_K", 2, 0)]
)
def test_with_avx2_on_zen_passes_of_two_rows_prefetch_all_lines_or_none(format: str, rows: int, all_lines: int) -> None:
    text = assembly(mat_mul(format, rows), ZEN3)
    lines = -(-INTEGER_PANELS[format].block_bytes // LINE)
    assert text.count("prefetcht1") == pytest.approx(lines * all_lines, abs=all_lines)


@pytest.mark.parametrize("format", ["Q4_0", "Q4_K", "Q6_K"])
def test_on_zen_the_pipes_of_the_products_do_not_shift_bytes(format: str) -> None:
    assert "vgf2p8" not in assembly(mat_mul(format), ZEN4)


def in_pairs(name: str) -> list[str]:
    """Return the formats whose matrix-matrix product uses 16-bit multiplication on this instruction set."""
    return [format for format, panel in INTEGER_PANELS.items() if wide.used(isa.isa_named(name), panel)]


def test_formats_of_any_byte_multiply_in_pairs_on_avx2_alone() -> None:
    assert {name: in_pairs(name) for name in INSTRUCTIONS if in_pairs(name)} == {"avx2": ["Q8_0", "IQ4_NL", "IQ4_XS"]}


class WideArguments(Struct):
    x: Rows
    w: Address
    widened: Address
    blocks: Int64
    sums: Address


@pytest.mark.parametrize("format", in_pairs("avx2"))
def test_a_tile_in_pairs_keeps_its_sums_in_registers(format: str) -> None:
    """An iteration covers 32 weights, with two instructions per 16 products. Only the end of an iteration may
    use the stack.
    """

    def body(f, a, thread, threads) -> None:  # type: ignore[no-untyped-def]
        x = [a.x.row(f.i64(row)) for row in range(wide.ROWS)]
        wide.tile(f, INTEGER_PANELS[format], a.w, x, a.widened, a.blocks, a.sums)

    text = assembly(kernel(f"wide_{format}", WideArguments, body), isa.isa_named("avx2"))
    loops = [block for block in re.split(r"^\.?\w+:.*$", text, flags=re.MULTILINE) if "vpmaddwd" in block]
    assert len(loops) == 1
    products, sums = (len(re.findall(rf"{name}\s.*%ymm", loops[0])) for name in ("vpmaddwd", "vpaddd"))
    assert products == 2 * wide.ROWS * wide.LINE // 2
    assert sums <= products
    assert len(re.findall(r"\(%(?:rsp|rbp)\)", loops[0])) <= 4  # 30 and 67 if the compiler may reorder the sums


def test_bfloats_are_multiplied_in_pairs_and_stay_in_registers() -> None:
    """If the instruction set has VDPBF16PS, every tile uses only that instruction for products. Otherwise no
    tile uses it.
    """
    features = dict.fromkeys((*isa.X86_ROWS["avx512-vnni"][0], "avx512bf16"), True)
    text = assembly(linear.linear("BF16"), isa.for_cpu("znver4", features, "x86_64"))
    loops = [block for block in re.split(r"^\.?\w+:.*$", text, flags=re.MULTILINE) if "vdpbf16ps" in block]
    products = sorted(len(re.findall(r"vdpbf16ps\s.*%zmm", loop)) for loop in loops)
    assert products == sorted(rows * panels for rows in (1, 2, 4, 6) for panels in (1, 2))  # rows x panels of each tile
    assert not any(re.search(r"\(%(?:rsp|rbp)\)|vfn?madd", loop) for loop in loops)
    assert "vdpbf16ps" not in assembly(linear.linear("BF16"), isa.isa_named("avx512-vnni"))


@pytest.mark.parametrize("format", [name for name, panel in INTEGER_PANELS.items() if panel.in_order])
def test_a_decoding_product_loads_in_the_order_of_memory(format: str) -> None:
    """Hardware prefetchers follow sequential loads.

    Without ordering, the compiler shuffles the loads of a block. Only neighboring loads may be swapped.
    """
    text = assembly(mat_mul(format), isa.isa_named("avx512-vnni"))
    runs = []
    for block in re.split(r"^\.?\w+:.*$", text, flags=re.MULTILINE):
        offsets: dict[str, list[int]] = {}
        for line in block.splitlines():
            if "broadcast" in line or "(%rsp)" in line:  # activations and spilled sums
                continue
            if found := re.search(r"(-?\d*)\((%r\w+(?:,%r\w+)?)\), %zmm", line):
                offsets.setdefault(found[2], []).append(int(found[1] or 0))
        if re.search(ANY_DOT, block):
            runs += offsets.values()
    loads = min(32, sum(count for size, count in INTEGER_PANELS[format].fields if size == 4))
    values = max(runs, key=len)[:loads]
    assert len(values) == loads
    assert all(abs(a - b) <= 128 for a, b in zip(values, sorted(values), strict=True)), values


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_several_rows_of_bytes_load_scales_after_values(rows: int) -> None:
    """The scales of a block follow its values in memory."""
    text = assembly(mat_mul("Q8_0", rows), ZEN4)
    [loop] = [block for block in re.split(r"^\.?\w+:.*$", text, flags=re.MULTILINE) if re.search(ANY_DOT, block)]
    loads = re.findall(r"\tvpxorq\s.*\(%r\w+,%r\w+\)|\tvcvtph2ps\s.*\(%r\w+,%r\w+\)", loop)
    assert ["scale" if "vcvtph2ps" in load else "values" for load in loads] == [*8 * ["values"], "scale"]


@pytest.mark.parametrize("format", ["Q6_K"])
def test_spills_of_wide_registers_stay_within_a_cache_line(format: str) -> None:
    text = assembly(linear.linear(format), isa.isa_named("avx512-vnni"))
    spills = re.findall(r"vmov(\w+)\s.*\(%r[sb]p\).*%zmm|vmov(\w+)\s+%zmm.*\(%r[sb]p\)", text)
    assert spills
    assert not [name for pair in spills for name in pair if name.startswith(("dqu", "ups", "upd"))]


@pytest.mark.parametrize(("format", "signs", "index_bytes"), [("IQ3_XXS", 66, 8), ("IQ3_S", 74, 8), ("IQ2_S", 34, 4)])
def test_a_panel_of_a_codebook_holds_the_signs_and_indices_of_a_group_together(
    format: str, signs: int, index_bytes: int
) -> None:
    """Otherwise a block is read from two places at a time, and prefetchers lose both."""
    places = INTEGER_PANELS[format].places(isa.isa_named("avx2"))
    for group in range(8):
        indices = range(2 + index_bytes * group, 2 + index_bytes * (group + 1), 4)
        found = sorted(places[at] for at in (signs + 4 * group, *indices))
        assert found == list(range(found[0], found[0] + index_bytes + 4, 4))
