"""The small plans in emulated CUDA, for two compute capabilities, with threads in ascending and in descending order."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.backends.base import Limits
from localllm.backends.gpu import bind, formats
from localllm.backends.gpu.cachetypes import CACHE
from localllm.backends.gpu.kernels.signatures import signatures
from tests.backends.gpu.emulation import COMPILER, WHY_NOT, EmulatedBackend
from tests.backends.gpu.small import PLANS, check
from tests.backends.support import record

needs_compiler = pytest.mark.skipif(COMPILER is None, reason=WHY_NOT)
# Compute capability, whether the last thread of a block runs first, and plans. sm_75 has neither asynchronous
# copies nor the one-instruction reduction, and its matrix instructions are half as large. All capabilities
# from sm_80 on use the same kernels.
WAYS = (
    ("sm_90", True, tuple(PLANS)),
    ("sm_75", False, ("rows", "products", "experts", "keys and values in blocks")),
)


@needs_compiler
@pytest.mark.parametrize(("compute", "backwards", "name"), [(*way, name) for *way, names in WAYS for name in names])
def test_cuda(folder: Path, compute: str, backwards: bool, name: str) -> None:
    backend = EmulatedBackend(folder, compute, backwards)
    for small in PLANS[name]:
        check(backend, small)


def test_every_kernel_format_and_cache_type_is_there() -> None:
    every = [small for name in PLANS for small in PLANS[name]]
    programs = [
        bind.program(record(small.table, small.build), Limits(20, 20, 1, 64), small.cache, (), compute)
        for small in every
        for compute in ("", "sm_90")
    ]
    kernels = [kernel for program in programs for kernel in program.kernels()]
    assert {kernel.name for kernel in kernels} == set(signatures())
    assert {kernel.weight_format for kernel in kernels if kernel.name == "embed"} == set(formats.FORMATS)
    for part in ("keys", "values"):
        assert {getattr(small.cache, part) for small in every} == set(CACHE)
