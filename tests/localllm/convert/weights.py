"""The weights of the tiny checkpoints, seeded by the tensor names, and the prompt that their results are for."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from tests.localllm.convert.hf_tokenizers import VOCABULARY

XIELU = ("act_fn.beta", "act_fn.eps")  # parameters of Apertus' xIELU activation
TOKENS = 24  # prompt length, longer than the models' sliding windows
POSITIONS = [0, 6, 11, 17, 23]  # positions whose logits are stored; of some models, every other one of them


def ids() -> list[int]:
    return [1, *(int(i) for i in np.random.default_rng(3).integers(3, VOCABULARY, TOKENS - 1))]


PROMPT, ANSWER = ids()[:16], [0, *ids()[16:]]  # of T5: encoder input, decoder input


def numbers(name: str, shape: list[int], base: float | list[Any]) -> np.ndarray:
    """Return weights, seeded by the name, that make every tensor matter: peaked attention, norms away from 1, nonzero
    biases.
    """
    if isinstance(base, list):
        return np.array(base)
    if name.endswith(XIELU):
        return np.full(shape, base, np.float32)
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name.lower() and name.endswith("weight"):
        return np.float32(base) + np.float32(0.3) * noise
    if "bias" in name.rsplit(".", 1)[-1] or name.endswith("sinks"):
        return np.float32(0.3) * noise
    if "embed" in name:
        return noise
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0
    return noise * np.float32(gain / shape[-1] ** 0.5)


def fp8(x: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize to FP8; return codes, block scales and dequantized values.

    Each block's maximum maps to the largest FP8 value.
    """
    code = np.arange(127)  # E4M3 codes of positive values: 4 exponent bits (bias 7), 3 mantissa bits
    positive = np.where(code < 8, code * 2.0**-9, (8 + code % 8) * 2.0 ** (code // 8 - 10.0))
    rows, columns = (np.arange(n) // size for n, size in zip(x.shape, (height, width), strict=True))
    scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scales, (rows[:, None], columns), np.abs(x) / np.float32(448))
    by_value = scales[rows[:, None], columns]
    nearest = np.searchsorted((positive[1:] + positive[:-1]) / 2, np.abs(x) / by_value)
    values = np.copysign(positive[nearest].astype(np.float32), x) * by_value
    return (nearest | np.where(x < 0, 128, 0)).astype(np.uint8).view(np.int8), scales, values
