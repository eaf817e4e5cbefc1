"""IQ1_S and IQ1_M, whose panels hold coordinates instead of the file's indices.

Every index is converted, and the larger panels are counted.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm import quant
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.budget import plan_memory
from localllm.backends.cpu.weights import stored_bytes
from localllm.loading.loader import panels_add
from localllm.plan import BLOCK
from tests.backends.support import feed, record, stored
from tests.models.support import MemoryWeight

INDICES, COLUMNS = 2048, 1024
LIMITS = Limits(rows=128, logit_rows=128, blocks=-(-128 // BLOCK), positions=128)


def every_point(format: str) -> MemoryWeight:
    """Return a matrix whose rows hold every point of the codebook, shifted up and then down."""
    numbers = np.arange(2 * INDICES).reshape(-1, 32) % INDICES  # 32 points per block
    down = np.arange(2 * INDICES).reshape(-1, 32) >= INDICES
    blocks = np.zeros((len(numbers), quant.FORMATS[format].block_bytes), np.uint8)
    first = 2 if format == "IQ1_S" else 0
    blocks[:, first : first + 32] = numbers & 255
    high = numbers >> 8
    s = np.arange(len(blocks)) % 8
    if format == "IQ1_S":
        blocks[:, :2] = np.frombuffer(np.float16(0.75).tobytes(), np.uint8)
        words = (high.reshape(-1, 8, 4) << np.array([0, 3, 6, 9])).sum(-1) | s[:, None] << 12
        blocks[:, 34:] = (words | down[:, ::4] * 0x8000).astype("<u2").view(np.uint8)
    else:
        nibbles = high | down * 8
        blocks[:, 32:48] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        d = int(np.float16(0.75).view(np.uint16)) >> np.array([0, 4, 8, 12]) & 15
        words = (s[:, None] * 0o1111 & 0xFFF) | d << 12
        blocks[:, 48:] = words.astype("<u2").view(np.uint8)
    rows = blocks.reshape(-1, quant.row_bytes(format, COLUMNS))
    return MemoryWeight("w", format, (len(rows), COLUMNS), rows)


@pytest.mark.parametrize("format", ["IQ1_S", "IQ1_M"])
def test_every_point_is_converted(cpu: CpuBackend, format: str) -> None:
    """Rows that are embedded have the values that the format defines."""
    weight = every_point(format)
    rows = weight.shape[0]
    executable = cpu.bind(record(weight, lambda r, x: x), LIMITS, CacheTypes("f16", "f16"))
    np.testing.assert_array_equal(feed(executable, np.arange(rows)), weight.values())
    assert np.unique(np.abs(weight.values())).size > 8
    executable.close()


@pytest.mark.parametrize(("format", "bytes_"), [("IQ1_S", 70), ("IQ1_M", 76), ("IQ2_XXS", 66)])
def test_memory_is_that_of_the_panels(cpu: CpuBackend, format: str, bytes_: int) -> None:
    """Planned and allocated memory, and the bytes that a token reads, count the converted blocks."""
    table, weight = stored("t", "F32", (96, COLUMNS)), stored("w", format, (96, COLUMNS))
    plan = record(table, lambda r, x: r.linear(x, weight))
    planned = plan_memory(plan, LIMITS, 1, CacheTypes("f16", "f16"))
    executable = cpu.bind(plan, LIMITS, CacheTypes("f16", "f16"))
    matrix = 96 * COLUMNS // 256 * bytes_
    assert planned.weights == executable.memory.weights == 4 * 96 * COLUMNS + matrix
    assert planned.weights_per_token == stored_bytes(plan.matrices["w"]) == matrix
    assert panels_add(plan) == matrix - plan.matrices["w"].bytes  # a server's cache gets less by it
    executable.close()
