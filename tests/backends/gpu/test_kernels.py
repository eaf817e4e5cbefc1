"""Kernel declarations check their types, launches take the buffers of the kernel's signature in the source, and read
only memory that was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from localllm.backends.allocation import Buffer
from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.gpu.bind import program
from localllm.backends.gpu.device import LEAST_LOCAL
from localllm.backends.gpu.emit import EMITTERS
from localllm.backends.gpu.kernels import attention, largest, products, recurrence, rowwise, streams
from localllm.backends.gpu.kernels import experts as expert_kernels
from localllm.backends.gpu.kernels.kernel import Kernel, Launch
from localllm.backends.gpu.kernels.products import Matmul, Matvec, Pairs, Product
from localllm.backends.gpu.kernels.signatures import Parameter, read, signatures
from localllm.backends.gpu.program import Program
from localllm.backends.gpu.references import CacheOf, Choices, Fixed, MatrixOf, Reference, RopeTableOf, VectorOf
from localllm.backends.gpu.steps import ROW_CLASSES
from localllm.plan import HeadsAppend, LinearAdd, LinearGlu, LinearGroup, Operation, Plan
from tests.backends.attending import Heads
from tests.backends.cases import linear_attention
from tests.backends.gpu.small import PLANS, Small, attended, experts, pools, selected, table
from tests.backends.selecting import Pooling, Selecting
from tests.backends.support import record
from tests.models.support import BOUNDARIES, EVERY_OPERATION
from tests.plan.support import MODELS, tiny_plan

MODULES = (attention, expert_kernels, largest, products, recurrence, rowwise, streams)
DECLARED: list[type[Kernel]] = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Kernel) and kind.__module__ == module.__name__
]


def test_every_kernel_of_the_sources_is_declared_and_has_its_flag() -> None:
    assert {kind.name for kind in DECLARED} == set(signatures())
    assert {name for name, own in signatures().items() if not own.flag} == {"attend_selected", "largest", "tensor"}
    assert {own.macro for own in signatures().values()} == {"", "EXPERTS", "ROTATED"}


SOURCE = """
#if ROTATED  // more
#define MORE_ARGUMENTS , GLOBAL const int *choices, \\
  GLOBAL uint *in
#else
#define MORE_ARGUMENTS
#endif
#define ALL_ARGUMENTS SHAPE_PARAMETER GLOBAL const uchar *RESTRICT w, GLOBAL float *y MORE_ARGUMENTS
#ifdef MUL  // one flag
KERNEL(SIZE, mul)(ALL_ARGUMENTS LOCAL_ARGUMENT) {
}
#endif
KERNEL(64, plain)(GLOBAL const int *x,
                  GLOBAL float *y) {
"""


def test_signatures_are_read_from_the_source() -> None:
    of = read([SOURCE])
    assert (of["mul"].flag, of["mul"].size, of["mul"].local, of["mul"].macro) == ("MUL", "SIZE", True, "ROTATED")
    assert list(of["mul"].parameters.items()) == [("w", Parameter("uchar", False)), ("y", Parameter("float", True))]
    assert list(of["mul"].more.items()) == [("choices", Parameter("int", False)), ("in_", Parameter("uint", True))]
    assert (of["plain"].flag, of["plain"].size, of["plain"].local, of["plain"].macro) == ("", "64", False, "")
    assert list(of["plain"].parameters) == ["x", "y"]


@pytest.mark.parametrize(("text", "wrong", "problem"), [
    ("GLOBAL float *y MORE", "GLOBAL float *y, int n MORE", "not the parameters of a kernel"),
    ("LOCAL_ARGUMENT)", ", GLOBAL float *z)", "MORE_ARGUMENTS must be the only condition, and the last"),
    ("ROTATED ", "ROTATED > 1 ", "MORE_ARGUMENTS must be the only condition"),
    ("#if ROTATED  // more", "#if ROTATED\n#else", "MORE_ARGUMENTS must be the only condition"),
    ("64, plain", "64, mul", "mul is declared twice"),
    ("MORE_ARGUMENTS\n#endif", "MORE_ARGUMENTS , GLOBAL int *z\n#endif", "MORE_ARGUMENTS is declared twice"),
])  # fmt: skip
def test_signatures_of_another_form_are_refused(text: str, wrong: str, problem: str) -> None:
    assert SOURCE.count(text) == 1
    with pytest.raises(ValueError, match=problem):
        read([SOURCE.replace(text, wrong)])


PRODUCT = Product(
    K=64, N=32, X_STRIDE=64, Y_STRIDE=32, RESIDUAL_STRIDE=32, FACTOR=1.0, COUNT_AT=0, HAS_BIAS=False, HAS_RESIDUAL=False
)
OF_EXPERTS = replace(PRODUCT, pairs=Pairs(EXPERTS=4, PER_ROW=1, HAS_SCALES=False, PAIRS=8))
NOTHING = Fixed.NOTHING
PLAIN: dict[str, Reference] = {"w": MatrixOf("w"), "x": NOTHING, "y": NOTHING, "bias": NOTHING, "residual": NOTHING}
PAIRS = {**PLAIN, "choices": Choices(3, "experts"), "scales": NOTHING}


def programs() -> Iterator[tuple[Plan, Program]]:
    for name in MODELS:
        for compute in ("", "sm_90"):
            for cache_types in (CacheTypes(), CacheTypes("q8_0", "q4_0")):
                yield tiny_plan(name), program(tiny_plan(name), Limits(80, 8, 4, 256), cache_types, (), compute)
    for small in (small for group in PLANS.values() for small in group):
        plan = record(small.table, small.build)
        yield plan, program(plan, Limits(80, 8, 1, 64), small.cache, (), "sm_90")


def test_every_macro_of_a_declaration_is_in_its_sources() -> None:
    seen = set()
    for _, made in programs():
        for kernel in made.kernels():
            if type(kernel) not in seen:
                seen.add(type(kernel))
                text = kernel.source(generic=False).split("\n", len(kernel.constants()))[-1]
                for name, _, _ in kernel.constants():
                    assert re.search(rf"\b{name.partition('(')[0]}\b", text), (kernel.name, name)
    assert seen == set(DECLARED)


def test_a_generic_kernel_gets_shapes_and_factors_at_run_time() -> None:
    kernel = rowwise.RotateHeads(MAX_ROWS=80, WIDTH=64, STRIDE=72, HEAD=16, N_ROT=8, NEOX=True)
    assert kernel.numbers().tolist() == [80, 64, 72, 16, 8]
    head = kernel.source(generic=True).split("//")[0]
    assert head == (
        "#define GENERIC 1\n#define ROTATE 1\n#define MAX_ROWS shape[0]\n#define WIDTH shape[1]\n"
        "#define STRIDE shape[2]\n#define HEAD shape[3]\n#define N_ROT shape[4]\n#define NEOX 1\n"
    )
    capped = rowwise.Elements(
        OPERATION="(a) * FACTOR", WIDTH=8, STRIDE=8, delivered=rowwise.delivered(True, 0), FACTOR=0.5
    )
    assert capped.numbers().tolist() == [8, 8, 0, 0x3F000000]
    assert "#define OPERATION(a, b) ((a) * FACTOR)\n" in capped.source(generic=True)
    assert "#define FACTOR AS_FLOAT(shape[3])\n" in capped.source(generic=True)
    assert "#define FACTOR (5.000000000e-01f)\n" in capped.source(generic=False)


def test_what_a_declaration_does_not_allow_is_refused_when_it_is_made() -> None:
    shape: dict[str, Any] = {"MAX_ROWS": 80, "WIDTH": 64, "STRIDE": 64, "HEAD": 16, "N_ROT": 8, "NEOX": True}
    for wrong in ({"NEOX": 1}, {"WIDTH": 64.0}, {"WIDTH": True}, {"HEAD": None}, {"HEADS": 4}):
        with pytest.raises(TypeError):
            rowwise.RotateHeads(**{**shape, **wrong})
    for name in shape:
        with pytest.raises(TypeError, match=name):
            rowwise.RotateHeads(**{other: value for other, value in shape.items() if other != name})
    kernel, buffers = rowwise.RotateHeads(**shape), {"x": NOTHING, "table": NOTHING, "y": NOTHING}
    assert kernel.launch((1, 1, 1), **buffers).buffers == (NOTHING, Fixed.STEP, NOTHING, NOTHING)
    with pytest.raises(TypeError, match=r"rotate_heads: every buffer must be a reference to one, found .*'y': 'y'"):
        kernel.launch((1, 1, 1), x=NOTHING, table=NOTHING, y="y")  # type: ignore[arg-type]
    for name in buffers:
        with pytest.raises(TypeError, match=f"takes x, step, table, y; missing or additional: {name}"):
            kernel.launch((1, 1, 1), **{other: NOTHING for other in buffers if other != name})
    with pytest.raises(TypeError, match="missing or additional: z"):
        kernel.launch((1, 1, 1), **buffers, z=NOTHING)


def test_products_of_experts_take_the_choices_and_others_do_not() -> None:
    for own, right, wrong in ((PRODUCT, PLAIN, PAIRS), (OF_EXPERTS, PAIRS, PLAIN)):
        kernels: list[Kernel] = [
            Matmul(format="F32", product=own), Matvec(format="F32", COLUMNS=1, product=own),
            products.tensor("F16", products.PLAIN_TILE, 1, own),
        ]  # fmt: skip
        for kernel in kernels:
            expected = [*list(right.values())[:3], Fixed.STEP, *list(right.values())[3:]]
            assert list(kernel.launch((1, 1, 1), **right).buffers) == expected
            with pytest.raises(TypeError, match="missing or additional: choices, scales"):
                kernel.launch((1, 1, 1), **wrong)


def test_heads_that_no_tile_fits_are_refused() -> None:
    with pytest.raises(BackendError, match="heads of 1024 values do not fit on the GPU, at most 640 do"):
        lowered(attended(Heads(1, 1, 1024)))


# The largest shapes: the widest heads, and more experts than any known model.
LARGEST: tuple[Small, ...] = (
    *(attended(Heads(8, 1, width), *types) for width in (64, 128, 192, 256, 512, 640) for types in (
        ("f16", "f16"), ("f32", "f32"), ("q8_0", "q5_1"),
    )),
    attended(Heads(8, 1, 640, window=70, sinks=True)),
    *(selected(Selecting(Heads(16, 1, width, value_dim=width), 64, 256, 70), (1,)) for width in (128, 576, 640)),
    pools(Pooling(Heads(16, 1, 640, window=20, sinks=True), 4, 5), (1,)),
    experts("Q4_0 Q4_0 Q4_0", 32, "softmax", False, 1.0, "silu", count=1024),
    Small(linear_attention(1, 1, 512, 512, delta=True, tiled=False, channels=True), table(512 * 5)),
    Small(linear_attention(1, 1, 512, 512, delta=True, tiled=False), table(512 * 5)),
    *(small for group in PLANS.values() for small in group),
)  # fmt: skip


def lowered(small: Small, compute: str = "", local_memory: int = LEAST_LOCAL) -> Program:
    plan = record(small.table, small.build)
    return program(plan, Limits(512, 512, 65, 65 * 64), small.cache, (), compute, local_memory)


def test_no_kernel_needs_more_local_memory_than_opencl_promises() -> None:
    """OpenCL guarantees 32 KiB of local memory per work-group. The kernels stay within it at the largest shapes.

    CUDA's tensor-core kernels use 48 KiB, which every GPU has.
    """
    needed: dict[str, int] = {}
    for small in LARGEST:
        for kernel in lowered(small).kernels():
            needed[kernel.name] = max(needed.get(kernel.name, 0), kernel.local_bytes)
    assert set(needed) == set(signatures()) - {"tensor", "split_rows"}
    assert {name: size for name, size in needed.items() if size > 32768} == {}
    assert needed["attend_tile"] > 24000  # shows that the shapes are large enough for this test
    for small in LARGEST:
        assert max(kernel.local_bytes for kernel in lowered(small, "sm_90", 49152).kernels()) <= 49152


def test_a_device_with_more_local_memory_gets_the_larger_tiles() -> None:
    (least,), (most,) = (
        [k for k in lowered(attended(Heads(2, 1, 64)), "", size).kernels() if k.name == "attend_tile"]
        for size in (LEAST_LOCAL, 49152)
    )
    assert (least.TILE_KEYS, most.TILE_KEYS) == (32, 64)


def test_there_is_an_emitter_for_every_operation() -> None:
    assert set(EMITTERS) == EVERY_OPERATION | BOUNDARIES | {HeadsAppend, LinearAdd, LinearGlu, LinearGroup}

    class Unknown(Operation):
        pass

    plan = tiny_plan("llama plain")
    with pytest.raises(BackendError, match="no kernels for unknown on graphics cards yet"):
        program(replace(plan, operations=(*plan.operations, Unknown())), Limits(8, 8, 1, 64), CacheTypes())


def accesses(launch: Launch) -> tuple[set[object], set[object]]:
    """Return the activations and scratch buffers that a launch reads, and those that it writes."""
    both = zip(launch.kernel.parameters().values(), launch.buffers, strict=True)
    own = [(taken.written, at) for taken, at in both if isinstance(at, Buffer | Choices) or at is Fixed.PARTIAL]
    return {at for written, at in own if not written}, {at for written, at in own if written}


def test_what_a_launch_reads_was_written_before_and_is_not_what_it_writes() -> None:
    """Launches read only written memory and never write their inputs, for every batch size, in tiny models and small
    plans, with and without tensor cores.

    The host writes lookup data before a stage.
    """
    for plan, lowered in programs():
        for rows in ROW_CLASSES:
            made: set[object] = {buffer for stage in lowered.stages for _, buffer in stage.looked_up}
            for dispatch in lowered.dispatches:
                for launch in dispatch.launches(rows):
                    reads, writes = accesses(launch)
                    assert reads <= made, (dispatch.label, launch.kernel.name, rows)
                    assert not reads & writes, (dispatch.label, launch.kernel.name, rows)
                    made |= writes
            assert lowered.where[plan.logits.index] in made


ELEMENTS = {
    Buffer: {"float"}, MatrixOf: {"uchar"}, VectorOf: {"float"}, RopeTableOf: {"float"}, CacheOf: {"uchar", "float"},
    Choices: {"int", "float"}, Fixed.STEP: {"int"}, Fixed.WANTED: {"int"}, Fixed.TABLES: {"int"},
    Fixed.WINDOW_TABLES: {"int"}, Fixed.PARTIAL: {"float"}, Fixed.SCORES: {"float"}, Fixed.PICKED: {"int"},
    Fixed.EVEN_KEYS: {"uint"}, Fixed.ODD_KEYS: {"uint"},
}  # fmt: skip


def test_buffers_have_the_element_type_that_the_kernel_reads() -> None:
    for _, lowered in programs():
        own = [d.launches(rows) for d in lowered.dispatches for rows in ROW_CLASSES]
        for launch in (launch for launches in (*own, lowered.has_top_k) for launch in launches):
            for (name, taken), at in zip(launch.kernel.parameters().items(), launch.buffers, strict=True):
                kind = at if isinstance(at, Fixed) else type(at)
                assert at is NOTHING or taken.element in ELEMENTS[kind], (launch.kernel.name, name, at)
