"""Rotations with several axes on a device, and on the emulated CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.backends.base import Backend
from localllm.plan import RopeStyle
from tests.backends.gpu.emulation import COMPILER, WHY_NOT, EmulatedBackend
from tests.backends.test_axes import STYLES, check_axes


@pytest.mark.parametrize("style", STYLES)
def test_device(gpu: Backend, style: RopeStyle) -> None:
    check_axes(gpu, style)


@pytest.mark.skipif(COMPILER is None, reason=WHY_NOT)
def test_emulated_cuda(folder: Path) -> None:
    check_axes(EmulatedBackend(folder), "neox")
