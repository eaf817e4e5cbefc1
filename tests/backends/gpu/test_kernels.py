"""Kernel declarations match the kernel sources and check their types, and launches read only memory that was
written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

import pytest

from localllm.backends.allocation import Buffer
from localllm.backends.base import BackendError, CacheTypes, Limits
from localllm.backends.gpu.bind import program
from localllm.backends.gpu.device import LEAST_LOCAL
from localllm.backends.gpu.emit import EMITTERS
from localllm.backends.gpu.kernels import (
    attention,
    columns,
    indexer,
    largest,
    products,
    recurrence,
    rowwise,
    streams,
)
from localllm.backends.gpu.kernels import experts as expert_kernels
from localllm.backends.gpu.kernels.kernel import Access, Kernel, Launch
from localllm.backends.gpu.kernels.products import ExpertBuffers, ExpertProduct, Matmul, Product, ProductBuffers
from localllm.backends.gpu.program import Program
from localllm.backends.gpu.references import Choices, Fixed, MatrixOf
from localllm.backends.gpu.steps import ROW_CLASSES
from localllm.plan import CacheLayer, HeadsAppend, LinearAdd, LinearGlu, LinearGroup, Operation, Plan
from tests.backends.attending import Heads
from tests.backends.cases import linear_attention
from tests.backends.gpu.small import PLANS, Small, attended, experts, pools, selected, table
from tests.backends.selecting import Pooling, Selecting
from tests.backends.support import record
from tests.models.support import BOUNDARIES, EVERY_OPERATION
from tests.plan.support import MODELS, tiny_plan

MODULES = (attention, columns, expert_kernels, indexer, largest, products, recurrence, rowwise, streams)
DECLARED: list[type[Kernel[Any]]] = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Kernel) and kind.__module__ == module.__name__
]
Signature = tuple[tuple[str, Access], ...]


def sources() -> str:
    folder = files("localllm.backends.gpu") / "kernels"
    return "\n".join(path.read_text(encoding="utf-8") for path in folder.iterdir() if path.name.endswith(".cl"))


@cache
def written() -> dict[str, set[Signature]]:
    """Return the signatures of every kernel in the sources, one per way of defining the macros."""
    text = re.sub(r"\\\n", " ", sources())
    macros: dict[str, list[str]] = {}
    for name, value in re.findall(r"^#define (\w+_ARGUMENTS)(.*)$", text, re.MULTILINE):
        macros.setdefault(name, []).append(value)
    found: dict[str, set[Signature]] = {}
    for name, parameters in re.findall(r"^KERNEL\(\w+, (\w+)\)\(([^{]*)\) \{", text, re.MULTILINE):
        found[name] = set(signatures(parameters, macros))
    return found


def signatures(parameters: str, macros: dict[str, list[str]]) -> Iterator[Signature]:
    used = [name for name in macros if re.search(rf"\b{name}\b", parameters)]
    if used:
        for values in product(*(macros[name] for name in used)):
            expanded = parameters
            for name, value in zip(used, values, strict=True):
                expanded = re.sub(rf"\b{name}\b", lambda _, value=value: value, expanded)
            yield from signatures(expanded, macros)
        return
    plain = re.sub(r"\b(SHAPE_PARAMETER|LOCAL_ARGUMENT|RESTRICT)\b", "", parameters)
    matches = [re.fullmatch(r"\s*GLOBAL (const )?(\w+) \*\s*(\w+)\s*", each) for each in plain.split(",")]
    assert all(matches), plain
    yield tuple((m[3], Access(m[2], m[1] is None)) for m in matches if m is not None)


def test_every_kernel_is_declared_with_the_signatures_of_its_source() -> None:
    """The declaration and the source have the same argument names, order and element types, and write the
    same buffers.
    """
    found: dict[str, set[Signature]] = {}
    for kind in DECLARED:
        buffers = kind.buffers()
        own = {tuple(buffers.parameters(groups)) for groups in (False, True)}
        found.setdefault(kind.name, set()).update(own)
    assert found == written()
    # Products of one matrix and cache appends have two signatures each.
    assert sum(map(len, found.values())) == len(found) + 4


CACHE = attention.cache_shape(CacheTypes(), CacheLayer(2, 64, 64))
PRODUCT = Product(
    K=64, N=32, X_STRIDE=64, Y_STRIDE=32, RESIDUAL_STRIDE=32, FACTOR=1.0, COUNT_AT=0, HAS_BIAS=False, HAS_RESIDUAL=False
)
OF_EXPERTS = ExpertProduct(
    K=64, N=32, X_STRIDE=64, Y_STRIDE=32, EXPERTS=4, PER_ROW=1, HAS_SCALES=False, HAS_BIAS=False, COUNT_AT=0, PAIRS=8
)
NOTHING = Fixed.NOTHING
PLAIN = ProductBuffers(w=MatrixOf("w"), x=NOTHING, y=NOTHING, bias=NOTHING, residual=NOTHING)
PAIRS = ProductBuffers(
    w=MatrixOf("w"), x=NOTHING, y=NOTHING, bias=NOTHING, residual=NOTHING,
    experts=ExpertBuffers(choices=Choices(3, "experts"), scales=NOTHING),
)  # fmt: skip


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
    with pytest.raises(TypeError, match=r"RotateHeadsBuffers\.y must be Buffer or MatrixOf or .*, found 'y'"):
        rowwise.RotateHeadsBuffers(x=NOTHING, table=NOTHING, y="y")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="do not match"):
        rowwise.RotateHeads(**shape).launch((1, 1, 1), rowwise.SplitRowsBuffers(x=NOTHING, y=NOTHING))  # type: ignore[arg-type]


def test_products_of_experts_take_the_choices_and_others_do_not() -> None:
    for own, right, wrong in ((PRODUCT, PLAIN, PAIRS), (OF_EXPERTS, PAIRS, PLAIN)):
        kernels: list[Kernel[ProductBuffers]] = [
            Matmul(format="F32", product=own), products.Matvec(format="F32", COLUMNS=1, product=own),
            products.tensor("F16", products.PLAIN_TILE, 1, own),
        ]  # fmt: skip
        for kernel in kernels:
            assert kernel.launch((1, 1, 1), right).buffers == right
            with pytest.raises(TypeError, match="do not match"):
                kernel.launch((1, 1, 1), wrong)
    assert len(PAIRS.references()) == len(PLAIN.references()) + 2


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
    assert set(needed) == set(written()) - {"tensor", "split_rows"}
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
    with pytest.raises(BackendError, match="there are no kernels for unknown on a graphics card yet"):
        program(replace(plan, operations=(*plan.operations, Unknown())), Limits(8, 8, 1, 64), CacheTypes())


def accesses(launch: Launch) -> tuple[set[object], set[object]]:
    """Return the activations and scratch buffers that a launch reads, and those that it writes."""
    both = zip(launch.buffers.parameters(), launch.buffers.references(), strict=False)
    own = [(access.written, at) for (_, access), at in both if isinstance(at, Buffer | Choices) or at is Fixed.PARTIAL]
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
