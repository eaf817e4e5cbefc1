"""Products on tensor cores, emulated on the host. Copies complete as late as allowed, and threads run one after
another.

The order of threads is ascending or descending.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.backends.gpu import formats
from localllm.backends.gpu.kernels import products
from localllm.backends.gpu.kernels.kernel import Kernel
from localllm.backends.gpu.kernels.products import Matmul, Product, Tile
from localllm.backends.reference import ReferenceBackend
from tests.backends.cpu.test_linear import quantized
from tests.backends.gpu.emulation import COMPILER, WHY_NOT, EmulatedBackend, EmulatedDevice
from tests.backends.support import UNIT, bind, feed, record, stored
from tests.backends.test_experts import TABLE, TOKENS, mixture
from tests.models.support import MemoryWeight

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WHY_NOT)


def blocks_of(x: np.ndarray) -> np.ndarray:
    """Return activations in the kernels' block format, as words: int8 values, scales, and the sum of each half block
    times the scale.
    """
    integers, scales = quantized(x)
    sums = scales * integers.astype(np.float32).reshape(*integers.shape[:2], 2, 16).sum(axis=3)
    parts = integers.astype(np.int8).reshape(len(x), -1).view(np.float32), scales[:, :, 0], sums.reshape(len(x), -1)
    return np.concatenate(parts, axis=1).astype(np.float32)


def multiplied(
    device: EmulatedDevice, kernel: Kernel, tile: Tile, weight: MemoryWeight, rows: np.ndarray
) -> np.ndarray:
    """Return the result (T, N) of one kernel launch on activations in the kernel's input format."""
    count, n = len(rows), weight.shape[0]
    matrix, x, y = (device.alloc(size, "") for size in (formats.size_of(weight), rows.nbytes, 4 * count * n))
    for offset, data in formats.pieces(weight):
        device.upload(matrix, offset, data)
    device.upload(x, 0, rows)
    y[:] = 0xFF
    step, nothing = device.alloc(64, ""), device.alloc(64, "")
    device.upload(step, 0, np.array([count], np.int32))
    compiled = device.compile(kernel.source(generic=False), kernel.name)
    launch = device.prepare(compiled, kernel.size, kernel.local_bytes, [matrix, x, y, step, nothing, nothing])
    launch((-(-n // tile.w), -(-count // tile.x), 1))
    return y.view(np.float32).reshape(count, n)


# Format, tile, matrix columns, matrix rows, tokens. They cover every layout of scales, minimums and row alignment, all
# tiles, an odd number of chunks, and tiles larger than both dimensions.
NARROW = products.EXPERTS_TILE
CASES = (
    ("Q4_0", Tile(128, 128), 96, 131, 130), ("Q8_0", Tile(64, 64), 160, 70, 67), ("Q5_1", NARROW, 96, 65, 33),
    ("Q4_K", Tile(64, 128), 256, 129, 65), ("Q6_K", Tile(64, 64), 256, 63, 50), ("Q2_K", NARROW, 256, 65, 20),
    ("IQ3_S", NARROW, 256, 1, 17), ("NVFP4", Tile(64, 64), 192, 40, 70), ("MXFP4", NARROW, 32, 20, 31),
)  # fmt: skip


@pytest.mark.parametrize(("format", "tile", "width", "n", "count"), CASES)
def test_int8_tiles_have_the_bits_of_the_tile_by_dp4a(
    folder: Path, format: str, tile: Tile, width: int, n: int, count: int
) -> None:
    weight = stored("w", format, (n, width))
    random = np.random.RandomState(width)
    x = (random.standard_normal((count, width)) * 10.0 ** random.uniform(-3, 1, (count, 1))).astype(np.float32)
    product = Product(
        K=width, N=n, X_STRIDE=width * 11 // 32, Y_STRIDE=n, RESIDUAL_STRIDE=n, FACTOR=1.0, COUNT_AT=0,
        HAS_BIAS=False, HAS_RESIDUAL=False,
    )  # fmt: skip
    tensor, plain = products.tensor(format, tile, 0, product), Matmul(format=format, product=product)
    truth = multiplied(EmulatedDevice(folder), plain, products.PLAIN_TILE, weight, blocks_of(x))
    integers, scales = quantized(x)
    defined = (integers * scales).reshape(x.shape) @ weight.values().astype(np.float64).T
    assert np.abs(truth - defined).max() < 1e-4 * np.abs(defined).max()
    for backwards in (False, True):
        found = multiplied(EmulatedDevice(folder, backwards=backwards), tensor, tile, weight, blocks_of(x))
        np.testing.assert_array_equal(found, truth)


# Format -> largest rounding error of a product, relative to its terms, and relative to a row's largest activation.
SIXTEEN = {"F16": (2.0**-11, 2.0**-38), "BF16": (2.0**-17, 0.0)}


@pytest.mark.parametrize("format", SIXTEEN)
@pytest.mark.parametrize("backwards", [False, True])
def test_products_of_16_bit_numbers(folder: Path, format: str, backwards: bool) -> None:
    """Activations have any magnitude, including zero and beyond the float16 range. Products have bias, scale and
    residual.
    """
    weight, bias = stored("w", format, (48, 48)), MemoryWeight.of("b", np.arange(48.0))
    x = np.random.RandomState(2).standard_normal((70, 48)).astype(np.float32)
    x *= 10.0 ** np.linspace(-30, 30, 70, dtype=np.float32)[:, None]
    x[5], x[6, 1:] = 0.0, 0.0
    backend = EmulatedBackend(folder, backwards=backwards)
    table = MemoryWeight.of("table", x)
    plan = record(table, lambda r, v: r.add(r.linear(v, weight, bias, 0.5), v))
    ours, exact = (feed(bind(b, plan), np.arange(70)) for b in (backend, ReferenceBackend()))
    assert {"split_rows", "tensor"} <= set(backend.device.launched)
    w = np.abs(weight.values().astype(np.float64))
    of_terms, of_largest = SIXTEEN[format]
    slack = ((of_terms + 60 * UNIT) * np.abs(x) + of_largest * np.abs(x).max(axis=1, keepdims=True)) @ w.T
    slack += 8 * UNIT * (np.abs(exact) + np.abs(bias.values()))
    assert (np.abs(ours - exact) <= slack).all()
    assert (np.abs(ours - exact) > 0.0).any()  # differs from the float32 product


def test_prefill_of_a_mixture(folder: Path) -> None:
    """Pairs of token and expert are grouped by expert, in tiles of all three kinds."""
    kinds = {"gate": "Q8_0", "up": "F16", "down": "Q4_0"}
    plan = record(TABLE, mixture("softmax", 12, formats=lambda name: kinds[name], extras=True))
    backend = EmulatedBackend(folder)
    rows, truth = (feed(bind(b, plan), np.arange(TOKENS)) for b in (backend, ReferenceBackend()))
    assert {"group_pairs", "split_rows", "tensor"} <= set(backend.device.launched)
    assert "matvec" not in backend.device.launched
    assert np.abs(rows - truth).max() < 0.01 * np.abs(truth).max()


@pytest.mark.parametrize("compute", ["sm_75", "sm_90"])
@pytest.mark.parametrize(("format", "width"), [("Q8_0", 32), ("Q8_0", 96), ("F16", 32), ("F16", 48), ("BF16", 48)])
def test_what_is_no_number_stays_in_its_row(folder: Path, format: str, width: int, compute: str) -> None:
    """A NaN or infinity affects only its own row, even if the next row starts within the same step of the tile."""
    x = np.ones((20, width), np.float32)
    x[0, 5], x[3, 5], x[4, 7] = np.nan, np.nan, np.inf
    plan = record(MemoryWeight.of("table", x), lambda r, v: r.linear(v, stored("a", format, (20, width))))
    found = np.isfinite(feed(bind(EmulatedBackend(folder, compute), plan), np.arange(20))).all(axis=1)
    np.testing.assert_array_equal(found, ~np.isin(np.arange(20), (0, 3, 4)))


def test_the_rule() -> None:
    """Every format except F32 uses tensor cores from some compute capability on. Tiles shrink until they fill
    the GPU.
    """
    for format in formats.FORMATS:
        from_ = (n for n in (70, 75, 80, 89, 90, 120) if products.terms(format, 256, f"sm_{n}") is not None)
        assert next(from_, None) == {"F32": None, "BF16": 80}.get(format, 75)
        assert products.terms(format, 256, "GPU") is None
    assert products.terms("F16", 24, "sm_90") is None
    assert products.tile_of("Q4_K", 14336, 512) == Tile(128, 128)
    assert products.tile_of("Q4_K", 2048, 512) == Tile(64, 128)
    assert products.tile_of("Q4_K", 512, 512) == Tile(64, 64)
    assert products.tile_of("Q6_K", 14336, 512) == Tile(64, 128)
