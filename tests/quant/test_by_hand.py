"""Blocks computed by hand from the docstrings of the formats, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest

from localllm import quant


def one(stored: bytes, name: str) -> list[float]:
    (row,) = quant.dequantize(np.frombuffer(stored, np.uint8)[None], name).tolist()
    return list(row)


def write(values: list[float], name: str) -> bytes:
    return quant.quantize(np.array([values], np.float32), name).tobytes()


def test_q4_0() -> None:
    nibbles = bytes(j | (15 - j) << 4 for j in range(16))
    expected = [0.5 * (j - 8) for j in range(16)] + [0.5 * (7 - j) for j in range(16)]
    assert one(b"\x00\x38" + nibbles, "Q4_0") == expected  # 0x3800 is float16 0.5
    # The largest magnitude, -8, gives scale 1.0.
    assert write([2 * v for v in expected], "Q4_0") == b"\x00\x3c" + nibbles


def test_q4_0_scale_comes_from_the_first_of_two_equal_magnitudes() -> None:
    # 4 is the first largest magnitude, so the scale is -0.5: 4 is stored as 0, -4 as 15 (clipped from 16), 0 as 8.
    assert write([4.0, -4.0] + [0.0] * 30, "Q4_0") == b"\x00\xb8" + bytes([0x80, 0x8F] + [0x88] * 14)
    assert write([-4.0, 4.0] + [0.0] * 30, "Q4_0") == b"\x00\x38" + bytes([0x80, 0x8F] + [0x88] * 14)


def test_blocks_without_spread() -> None:
    zeros, threes, weights = np.zeros((1, 32), np.float32), np.full((1, 32), -3, np.float32), np.ones(32, np.float32)
    for zero in (zeros, -zeros):  # 0 / -8 is -0, in float16 0x8000
        assert quant.quantize(zero, "Q4_0").tobytes() == b"\x00\x80" + b"\x88" * 16
    signs = np.where(np.arange(32) % 2, np.float32(-1e-16), np.float32(1e-16))[None]
    for tiny in (zeros, signs):  # below 1e-15 the search sets scale and integers to 0
        assert quant.quantize(tiny, "Q4_0", weights).tobytes() == bytes(18)
    assert quant.quantize(threes, "Q4_1").tobytes() == bytes(2) + b"\x00\xc2" + bytes(16)  # 0xC200 is float16 -3
    assert quant.quantize(threes, "Q4_1", weights).tobytes() == bytes(2) + b"\x00\xc2" + bytes(16)


@pytest.mark.parametrize(("name", "top"), [("Q4_1", 15), ("Q5_1", 31)])
@pytest.mark.parametrize("weights", [None, np.ones(32, np.float32)], ids=["plain", "imatrix"])
def test_an_offset_of_zero_has_the_sign_of_the_first_zero(name: str, top: int, weights: np.ndarray | None) -> None:
    fifth = bytes(quant.row_bytes(name, 32) - 20)  # the upper bits, in Q5_1
    for first, half in ((0.0, b"\x00\x00"), (-0.0, b"\x00\x80")):
        for ones in range(32):  # the minimum is at index `ones`; the other values alternate between zeros of both signs
            block = [1e-9] * ones + [first if i % 2 == 0 else -first for i in range(32 - ones)]
            stored = quant.quantize(np.array([block], np.float32), name, weights).tobytes()
            assert stored[:4] == bytes(2) + half  # a range of 1e-9 is below the smallest float16
        block = [first, -first] + [31.0] * 30
        stored = quant.quantize(np.array([block], np.float32), name, weights).tobytes()
        assert stored[2:4] == half
        assert stored[-16:] == bytes([top % 16 << 4] * 2 + [top % 16 * 17] * 14)
    zeros = np.where(np.arange(32) % 2, np.float32(-0.0), np.float32(0))[None]
    assert quant.quantize(zeros, name, weights).tobytes() == bytes(4) + fifth + bytes(16)
    assert quant.quantize(-zeros, name, weights).tobytes() == b"\x00\x00\x00\x80" + fifth + bytes(16)


def test_q5_1() -> None:
    q = list(range(32))
    fifth, nibbles = b"\x00\x00\xff\xff", bytes(j | j << 4 for j in range(16))  # q[16 + j] = 16 + j
    stored = b"\x00\x40" + b"\x00\xbc" + fifth + nibbles  # d = 2, m = -1
    assert one(stored, "Q5_1") == [2.0 * v - 1 for v in q]
    assert write([2.0 * v - 1 for v in q], "Q5_1") == stored


def test_q8_0() -> None:
    q = range(-16, 16)
    assert one(b"\x00\xc0" + bytes(v & 255 for v in q), "Q8_0") == [-2.0 * v for v in q]  # 0xC000 is float16 -2
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0)))
    values = [127.0, 0.5, -0.5, 1.5, -2.5, below_half, -below_half, 126.5] + [0.0] * 24
    rounded = [127, 1, -1, 2, -3, 0, 0, 127]  # ties away from zero; the largest magnitude of 127 gives scale 1
    assert write(values, "Q8_0") == b"\x00\x3c" + bytes(v & 255 for v in rounded) + bytes(24)


def test_q4_k() -> None:
    # the scales 1 2 3 63 17 34 51 60 and minimums 0 1 2 63 16 33 50 61, packed as the docstring of q4_k_q5_k says
    packed = bytes([0x41, 0x82, 0xC3, 0xFF, 0x40, 0x81, 0xC2, 0xFF, 0x01, 0x12, 0x23, 0xDC])
    nibbles = bytearray(b"\x95" * 128)  # codes: 5 in even groups, 9 in odd groups
    nibbles[32 + 3] = 0x0F  # value 3 of group 2 is 15, of group 3 is 0
    values = one(b"\x00\x3c" + b"\x00\x38" + packed + bytes(nibbles), "Q4_K")  # d = 1, dmin = 0.5
    expected = np.repeat([5.0, 17.5, 14.0, 535.5, 77.0, 289.5, 230.0, 509.5], 32)
    expected[2 * 32 + 3] = 3 * 15 - 1
    expected[3 * 32 + 3] = -31.5
    assert values == expected.tolist()


def test_q6_k() -> None:
    low, high = bytearray(128), bytearray(64)
    low[0] = 0x21  # low nibbles: q[0] = 1, q[64] = 2
    high[0] = 0b11_10_01_00  # upper bits: q[0] += 0, q[32] += 16, q[64] += 32, q[96] += 48
    scales = bytes([1, 0, 2, 0, 253, 0, 4] + [0] * 9)  # 253 is -3
    values = one(bytes(low) + bytes(high) + scales + b"\x00\x40", "Q6_K")  # d = 2
    assert [values[i] for i in (0, 32, 64, 96)] == [2.0 * (1 - 32), 4.0 * (16 - 32), -6.0 * (34 - 32), 8.0 * (48 - 32)]


def test_mxfp4() -> None:
    nibbles = bytes(j | (15 - j) << 4 for j in range(16))
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert one(b"\x80" + nibbles, "MXFP4") == [2 * v for v in levels] + [2 * v for v in reversed(levels)]
    # 6 is in [4, 8): scale 1, exponent 127. Ties take the smaller magnitude.
    values = [6.0, 0.25, 0.26, 0.75, -0.75, 2.5, 3.5, 5.0, -5.01, 1.25, -0.25] + [0.0] * 21
    assert write(values, "MXFP4") == b"\x7f" + bytes([7, 0, 1, 1, 9, 4, 5, 6, 15, 2, 0] + [0] * 5)
    # log2f(8 - 2**-21) is 3 in float32, so 8 has the same scale
    assert write([float(np.nextafter(np.float32(8), np.float32(0)))] + [0.0] * 31, "MXFP4")[0] == 128


def test_nvfp4() -> None:
    # group scales: 1 (exponent 7), 1.125, the smallest subnormal 2**-9, and 0x7F, which reads as 0
    stored = bytes([0x38, 0x39, 0x01, 0x7F]) + b"\x27" * 32  # low nibbles 7: level 6; high nibbles 2: level 1
    assert one(stored, "NVFP4") == [v * s for s in (1.0, 1.125, 2.0**-9, 0.0) for v in [6.0] * 8 + [1.0] * 8]
    assert write([6.0] * 8 + [-1.0] * 8 + [0.0] * 48, "NVFP4") == bytes([0x38, 0, 0, 0]) + b"\xa7" * 8 + bytes(24)


def test_q1_0() -> None:
    # Added in order, every 2**-11 vanishes in 16392 (half an ulp, ties to even). The mean, 128.0625, is halfway between
    # float16 128 and 128.125, and rounds to even. Any other order of addition gives 128.125.
    stored = write([16392.0, -0.0] + [-(2.0**-11)] * 7 + [2.0**-11] * 119, "Q1_0")
    assert stored == b"\x00\x58" + bytes([0b00000011, 0b11111110]) + b"\xff" * 14
    assert one(stored, "Q1_0") == [128.0] * 2 + [-128.0] * 7 + [128.0] * 119


def test_q2_0() -> None:
    stored = b"\x00\x38" + bytes([0b11_10_01_00] * 16)  # lowest bits first: -1, 0, 1, 2
    assert one(stored, "Q2_0") == [-0.5, 0.0, 0.5, 1.0] * 16
    assert write([-4.0, 1.99, 2.0, 4.0] * 16, "Q2_0") == b"\x00\x44" + bytes([0b10_10_01_00] * 16)  # 2 / 4 rounds to 1


def test_ternary() -> None:
    # digits of byte 0 of TQ1_0: 2 1 0 0 2 -> 2*81 + 27 + 2 = 191 -> ceil(191 * 256 / 243) = 202
    values = one(bytes([202]) + bytes(51) + b"\x00\x3c", "TQ1_0")
    assert [values[32 * k] for k in range(5)] == [1, 0, -1, -1, 1]
    values = one(bytes([0b10_00_01_10]) + bytes(63) + b"\x00\x3c", "TQ2_0")
    assert [values[32 * k] for k in range(4)] == [1, 0, -1, 1]


def test_iq4_xs() -> None:
    # group 5: low nibble 7 in the high half of byte 2, upper bits 01 at bit 10: s = 16 + 7 = 23
    stored = bytearray(136)
    stored[0:2] = b"\x00\x3c"
    stored[3] = 0b0000_0100
    stored[4 + 2] = 0x70
    stored[8 + 5 * 16] = 0xF8  # value 0 of the group: level 8 (1), value 16: level 15 (113)
    values = one(bytes(stored), "IQ4_XS")
    assert (values[160], values[161], values[176]) == ((23 - 32) * 1, (23 - 32) * -127, (23 - 32) * 113)


def test_plain_numbers() -> None:
    assert one(b"\x80\x3f", "BF16") == [1.0]
    assert write([1.0, 1.00390625, 1.01171875], "BF16") == b"\x80\x3f\x80\x3f\x82\x3f"  # ties to even
    assert one(b"\xff\xff\xfe\xff", "I16") == [-1.0, -2.0]
    assert one(np.array([2.0**-3, 1e300]).tobytes(), "F64") == [0.125, np.inf]
