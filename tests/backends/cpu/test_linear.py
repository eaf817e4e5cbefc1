"""Matrix products with quantized activations are bitwise identical regardless of batch size. They are checked
against a definition and against the exact product.

The definition: a row of activations is cut into blocks of 32. A block has a float32 scale = max / 127 and 32 integers
rint(x * (127 / max)). Integers are multiplied exactly. Every group of weights with a common scale adds float(integer) *
(weight scale * activation scale) to one chain of float32 fused multiply-adds. If a format has integer scales, blocks of
activations are as long as its super-blocks, 256. A super-block is then added as one group, whose integer is the sum of
scale * integer over its groups. With BF16 weights every activation is rounded to BF16, and one chain of float32 fused
multiply-adds runs in order of k.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm import quant
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.unpack import INTEGER_PANELS
from localllm.backends.cpu.weights import RepackedWeight
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Recorder, Value
from tests.backends.support import UNIT, bind, feed, record, stored
from tests.models.support import MemoryWeight

# Matrix rows, and columns in quantization blocks (three times the number for formats with short blocks).
SHAPES = ((1, 1), (17, 2), (70, 3))
BATCHES = (1, 2, 3, 4, 5, 6, 7, 11, 18, 67)  # batch sizes: products with packed bytes, and every tile size
VOCABULARY = 67


def columns(format: str, blocks: int) -> int:
    size = quant.FORMATS[format].block_values
    return blocks * (size if size > 32 else 96)


def activations(width: int) -> np.ndarray:
    """Return float32 activations (VOCABULARY, width) with blocks of every magnitude, a zero block, and a
    block so small that its scale is zero.
    """
    random = np.random.RandomState(width)
    blocks = random.standard_normal((VOCABULARY, width // 32, 32))
    size = 10.0 ** random.uniform(-3, 1, (VOCABULARY, width // 32, 1))
    size[1, 0], size[2, :] = 0.0, 1e-42
    blocks[3, 0] = np.arange(32) - 15.5  # multiples of 0.5, which are rounding ties
    size[3, 0] = 127 / 15.5
    return (blocks * size).astype(np.float32).reshape(VOCABULARY, width)


def block_of(format: str) -> int:
    """Return the number of activations that share a scale."""
    return 32 if INTEGER_PANELS[format].super_scales is None else 256


def quantized(x: np.ndarray, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Return the activations quantized by the definition: integers as float64 (T, blocks, size), scales as float32 (T,
    blocks, 1).
    """
    blocks = x.reshape(len(x), -1, size)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127.0) / largest
    inverse[~(inverse < np.float32(3e38))] = 0.0
    return np.rint(blocks * inverse).astype(np.float64), largest / np.float32(127.0)


def error(x: np.ndarray, size: int = 32) -> np.ndarray:
    """Return the largest quantization error of every activation: half a step, or the whole value in a block below
    1e-36.
    """
    steps = np.repeat(quantized(x, size)[1][:, :, 0].astype(np.float64), size, axis=1)  # (T, width)
    return np.where(127 * steps < 1e-36, np.abs(x), 0.5001 * steps)


@pytest.mark.parametrize("format", INTEGER_PANELS)
def test_the_definition_and_the_exact_product(cpu: CpuBackend, format: str) -> None:
    """The result is within float32 rounding of the definition. It is within the activations' quantization error of the
    exact product.
    """
    for rows, blocks in SHAPES:
        width = columns(format, blocks)
        x = activations(width)
        weight = stored("w", format, (rows, width))
        plan = record(MemoryWeight.of("table", x), lambda r, v, w=weight: r.linear(v, w))
        tokens = np.arange(VOCABULARY)
        ours = feed(bind(cpu, plan), tokens)

        w = weight.values().astype(np.float64)
        integers, scales = quantized(x, block_of(format))
        defined = (integers * scales).reshape(x.shape) @ w.T
        # A weight is scale * q - minimum. Each part is at most 3 times the largest weight of the group, because 16
        # random q spread over their range. A group has at least 16 weights, and its product, its scale and its sum are
        # rounded.
        largest = np.repeat(np.abs(w).reshape(rows, -1, 16).max(axis=2), 16, axis=1)  # (rows, width)
        rounding = (width / 16 + 8) * 3 * UNIT * (np.abs(x) @ largest.T)
        assert (np.abs(ours - defined) <= rounding).all(), format

        exact = feed(bind(ReferenceBackend(), plan), tokens)
        slack = error(x, block_of(format)) @ np.abs(w).T + rounding
        assert (np.abs(ours - exact) <= slack).all(), format


@pytest.mark.parametrize("format", ["BF16", *INTEGER_PANELS])
def test_rows_do_not_see_each_other(cpu: CpuBackend, format: str) -> None:
    """The bits of a product do not depend on the batch size, because packed weights and unpacked tiles are summed in
    the same order.
    """
    weight = stored("w", format, (100, columns(format, 2)))
    x = activations(weight.shape[1])
    executable = bind(cpu, record(MemoryWeight.of("table", x), lambda r, v: r.linear(v, weight)))
    tokens = np.arange(VOCABULARY)
    one_by_one = feed(executable, tokens, [1] * VOCABULARY)
    for rows in BATCHES:
        np.testing.assert_array_equal(feed(executable, tokens, [rows] * (VOCABULARY // rows)), one_by_one, str(rows))


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
def test_the_definition_to_the_bit(cpu: CpuBackend, format: str) -> None:
    """The expected chain is computed step by step in float64 instead of with fused multiply-adds, which
    rounds differently about once in a million operations.
    """
    rows, width = 64, 512
    x = activations(width)
    weight = stored("w", format, (rows, width))
    bytes_ = weight.rows.reshape(rows, -1, quant.FORMATS[format].block_bytes)
    w_scales = bytes_[:, :, :2].copy().view(np.float16).astype(np.float32)  # (rows, blocks, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.nan_to_num(np.rint(weight.values().reshape(rows, -1, 32) / w_scales))
    integers, x_scales = quantized(x)
    dots = np.einsum("tbk,rbk->btr", integers, q)  # exact: below 2^24
    total = np.zeros((VOCABULARY, rows), np.float32)
    for block, dot in enumerate(dots):
        scale = w_scales[:, block].T * x_scales[:, block]  # (T, rows) float32
        total = (dot * scale.astype(np.float64) + total).astype(np.float32)
    ours = feed(bind(cpu, record(MemoryWeight.of("table", x), lambda r, v: r.linear(v, weight))), np.arange(VOCABULARY))
    assert (ours == total).mean() > 0.999
    np.testing.assert_array_max_ulp(ours, total, 2)


def test_super_blocks_to_the_bit(cpu: CpuBackend) -> None:
    """Q4_K: the sum of the groups' integer dot products times their integer scales is exact.

    For each super-block, the contributions of scale and minimum are multiplied by the activation scale and added in
    order.
    """
    rows, blocks = 48, 5
    x, weight = activations(256 * blocks), stored("w", "Q4_K", (rows, 256 * blocks))
    bytes_ = weight.rows.reshape(rows, blocks, 144)
    d, d_min = np.moveaxis(bytes_[:, :, :4].copy().view(np.float16).astype(np.float32), 2, 0)  # (rows, blocks)
    six = bytes_[:, :, 4:16].astype(np.int64)
    low, high, mixed = six[:, :, :4], six[:, :, 4:8], six[:, :, 8:]
    scales = np.concatenate([low & 63, mixed & 15 | low >> 6 << 4], axis=2)  # (rows, blocks, 8)
    minimums = np.concatenate([high & 63, mixed >> 4 | high >> 6 << 4], axis=2)
    packed = bytes_[:, :, 16:].reshape(rows, blocks, 4, 1, 32)
    codes = np.concatenate([packed & 15, packed >> 4], axis=3).reshape(rows, blocks, 8, 32).astype(np.int64)
    integers, x_scales = quantized(x, 256)
    activation = integers.astype(np.int64).reshape(VOCABULARY, blocks, 8, 32)
    dots = np.einsum("rbg,tbgk,rbgk->btr", scales, activation, codes)
    sums = np.einsum("rbg,tbgk->btr", minimums, activation)
    total = np.zeros((VOCABULARY, rows), np.float32)
    for block in range(blocks):
        low = (sums[block].astype(np.float32) * -d_min[:, block]).astype(np.float64)  # (T, rows)
        both = (dots[block].astype(np.float32).astype(np.float64) * d[:, block] + low).astype(np.float32)
        total = (both.astype(np.float64) * x_scales[:, block] + total).astype(np.float32)
    ours = feed(bind(cpu, record(MemoryWeight.of("table", x), lambda r, v: r.linear(v, weight))), np.arange(VOCABULARY))
    assert (ours == total).mean() > 0.999
    np.testing.assert_array_max_ulp(ours[ours != total], total[ours != total], 2)


@pytest.mark.parametrize("columns", [2, 96, 255])
def test_bfloats_to_the_bit(cpu: CpuBackend, columns: int) -> None:
    """Activations of every magnitude, including ties, are rounded as the GGUF converter rounds. Then the chain of
    multiply-adds follows.
    """
    random = np.random.RandomState(columns)
    x = (random.standard_normal((VOCABULARY, columns)) * 2.0 ** random.uniform(-40, 40, (VOCABULARY, 1))).astype("f4")
    x.view(np.uint32)[:2] = 0x3FC08000 + (np.arange(columns) << 16) % 2**22  # ties to an even and to an odd neighbour
    weight = stored("w", "BF16", (70, columns))
    rounded = MemoryWeight.of("x", x, "BF16").values().astype(np.float64)
    total = np.zeros((VOCABULARY, 70), np.float32)
    for k in range(columns):
        # In float64 only the sum is rounded.
        total = (rounded[:, k, None] * weight.values()[:, k] + total).astype(np.float32)
    ours = feed(bind(cpu, record(MemoryWeight.of("table", x), lambda r, v: r.linear(v, weight))), np.arange(VOCABULARY))
    assert (ours == total).mean() > 0.999
    assert (np.abs(ours - total) <= 1e-6 * columns * np.abs(x).max(axis=1, keepdims=True)).all()


def test_what_a_buffer_held_before_is_no_part_of_a_row(cpu: CpuBackend) -> None:
    """BF16 activations are stored in pairs. After the end of a row with odd length, the buffer still holds an element
    of an earlier step, here infinity, which must have no effect.
    """
    weight = MemoryWeight.of("w", np.abs(stored("w", "F32", (64, 33)).values()), "BF16")

    def build(r: Recorder, x: Value) -> Value:
        y = r.linear(x, weight)
        large = r.scale(y, 1e30)  # the previous contents of the BF16 buffer
        return r.add(r.glu(r.scale(large, 1e30), large, "swiglu_oai"), y)  # infinity in the old buffer of x; clamped

    executable = bind(cpu, record(MemoryWeight.of("table", 1 + activations(64)[:, :33] ** 2), build))
    once, twice = (feed(executable, np.arange(VOCABULARY)) for _ in range(2))
    assert np.isfinite(once).all()
    np.testing.assert_array_equal(once, twice)


@pytest.mark.parametrize("of", ["norm", "glu"])
def test_who_makes_a_row_rounds_it_as_who_reads_it_would(cpu: CpuBackend, of: str) -> None:
    """A norm writes its output in every form that the following products read. Outputs of other operations are
    quantized separately. The bits are the same.
    """
    weights = [stored(f"w{format}", format, (40, 256)) for format in ("BF16", "Q8_0", "Q4_K", "F32")]
    table, gain = MemoryWeight.of("table", activations(256)), MemoryWeight.of("gain", np.ones(256))

    def made(r: Recorder, x: Value) -> Value:
        return r.rms_norm(x, gain, 1e-5) if of == "norm" else r.glu(x, r.add(x, x), "silu")

    def read(r: Recorder, x: Value) -> Value:
        first, *others = [r.linear(x, weight) for weight in weights]
        for other in others:
            first = r.add(first, other)
        return first

    tokens = np.arange(VOCABULARY)
    between = MemoryWeight.of("table", feed(bind(cpu, record(table, made)), tokens))
    ours = feed(bind(cpu, record(table, lambda r, x: read(r, made(r, x)))), tokens)
    np.testing.assert_array_equal(ours, feed(bind(cpu, record(between, read)), tokens))


# A quiet NaN, NaNs that would round to infinity or flip the sign, and the infinities.
@pytest.mark.parametrize("format", ["Q8_0", "BF16"])
@pytest.mark.parametrize("at", [0, 5, 16, 31])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7F800000, 0xFF800000])
def test_an_activation_that_is_no_number_shows(cpu: CpuBackend, format: str, at: int, bits: int) -> None:
    """A NaN at any of the 32 positions of a block must reach the output, so that a damaged model does not
    seem to work.
    """
    x = np.ones((2, 64), np.float32)
    x.view(np.uint32)[0, at] = bits
    weight = stored("w", format, (20, 64))
    rows = feed(bind(cpu, record(MemoryWeight.of("table", x), lambda r, v: r.linear(v, weight))), np.arange(2))
    assert not np.isfinite(rows[0]).any()
    assert np.isfinite(rows[1]).all()


@pytest.mark.parametrize("format", INTEGER_PANELS)
def test_scale_bias_and_residual(cpu: CpuBackend, format: str) -> None:
    """The product computes y = (W x) * scale + bias + residual, and rounds after each operation, in this order."""
    weight = stored("w", format, (45, columns(format, 1)))
    back = stored("back", "F32", (weight.shape[1], 45))
    bias = MemoryWeight.of("b", np.random.RandomState(0).standard_normal(45))
    embedding = MemoryWeight.of("table", activations(weight.shape[1]))
    tokens = np.arange(VOCABULARY)
    plain = feed(bind(cpu, record(embedding, lambda r, x: r.linear(x, weight))), tokens)
    all_of_it = feed(bind(cpu, record(embedding, lambda r, x: r.linear(x, weight, bias, 0.25))), tokens)
    np.testing.assert_array_equal(all_of_it, plain * np.float32(0.25) + bias.values())
    # The residual comes from an early operation, and the product's input is the GLU of two products.
    other = stored("other", format, weight.shape)
    down = record(
        embedding,
        lambda r, x: r.add(r.linear(r.glu(r.linear(x, weight), r.linear(x, other), "silu"), back, None, 0.001), x),
    )
    ours, exact = (feed(bind(b, down), tokens) for b in (cpu, ReferenceBackend()))
    w, v = (np.abs(m.values().astype(np.float64)) for m in (weight, other))
    x = np.abs(embedding.values().astype(np.float64))
    # |silu'| < 1.1: the quantization error of gate times up, and of up times gate, through the last product.
    errors = error(embedding.values(), block_of(format))
    gate, up, of_gate, of_up = x @ w.T, x @ v.T, errors @ w.T, errors @ v.T
    slack = 1.1 * (gate * of_up + up * of_gate + of_gate * of_up)
    slack = 0.001 * (slack @ np.abs(back.values()).T) + 1e-5 * (x + np.abs(exact)) + 1e-5
    assert (np.abs(ours - exact) <= slack).all()


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
def test_a_matrix_of_few_rows_is_work_for_all_threads(cpu: CpuBackend, format: str) -> None:
    """A task is two panels of the 24 matrix rows. The result contains the outputs of both panels."""
    shape = RepackedWeight(0, format, 2, 64, 1, 0, 0)
    assert [shape.chunk(threads) for threads in (1, 2, 8)] == [2, 1, 1]
    assert replace(shape, panels=16).chunk(8) == 2
    assert replace(shape, format="Q8_0").chunk(8) == 2
    weight, one = stored("w", format, (24, 70)), CpuBackend(1)
    rows = np.random.RandomState(1).standard_normal((13, 70)).astype(np.float32)
    plan = record(MemoryWeight.of("x", rows), lambda r, x: r.linear(x, weight))
    for sizes in ([1, 2], [9]):
        numbers = [feed(bind(backend, plan), np.arange(sum(sizes)) % 13, sizes) for backend in (cpu, one)]
        np.testing.assert_array_equal(*numbers)
    one.close()
