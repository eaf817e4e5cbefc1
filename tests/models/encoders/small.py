"""Small projectors whose files, inputs and embeddings are in the repository, in data/small.npz (see `make_small`)."""

from __future__ import annotations

import json
import math
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.support import MemoryWeight

DATA = Path(__file__).with_name("data") / "small.npz"


@dataclass(frozen=True)
class Shape:
    rows: int  # pixels, or mel bins
    columns: int  # pixels, or frames
    sound: bool = False
    flags: tuple[int, ...] = ()


SHAPES = {
    "qwen2vl": Shape(56, 84), "qwen2.5vl": Shape(168, 140), "qwen3vl": Shape(96, 128), "qwen3.5": Shape(64, 96),
    "ling3vl": Shape(64, 96), "exaone4_5": Shape(168, 140), "gemma3": Shape(224, 224), "gemma4v": Shape(96, 144),
    "gemma4uv": Shape(96, 144), "idefics3": Shape(128, 128), "pixtral": Shape(64, 48), "mistral3": Shape(56, 84),
    "lightonocr": Shape(56, 84), "internvl": Shape(112, 112), "internvl-qknorm": Shape(112, 112),
    "lfm2": Shape(96, 128), "paddleocr": Shape(56, 84), "phi4": Shape(48, 64), "janus_pro": Shape(128, 128),
    "kimivl": Shape(56, 84), "kimik25": Shape(56, 84), "glm4v": Shape(56, 84), "glm4v-ocr": Shape(56, 84),
    "dots_ocr": Shape(56, 84), "nemotron_v2_vl": Shape(128, 128), "youtuvl": Shape(160, 192),
    "minimax_m3": Shape(56, 84), "llava15": Shape(112, 112), "llava-swapped": Shape(112, 112),
    "llava-yi": Shape(112, 112), "llava-features": Shape(112, 112), "glm-edge": Shape(112, 112),
    "minicpmv-2.5": Shape(56, 84), "minicpmv-2.6": Shape(56, 84), "minicpmo-4.5": Shape(56, 84),
    "ultravox": Shape(80, 80, True), "voxtral": Shape(128, 80, True), "qwen2a": Shape(128, 80, True),
    "musicflamingo": Shape(128, 80, True), "glma": Shape(128, 80, True), "meralion": Shape(80, 120, True),
    "qwen3a": Shape(128, 200, True), "dots3note_a": Shape(128, 120, True), "gemma4a": Shape(128, 120, True),
    "gemma4ua": Shape(640, 5, True), "glm5v": Shape(56, 84), "cogvlm": Shape(112, 112), "llama4": Shape(112, 112),
    "muse-glimmer": Shape(112, 168), "minicpmv4_6-4": Shape(112, 112), "minicpmv4_6-2": Shape(84, 56),
    "step3vl": Shape(112, 112), "hunyuanvl": Shape(64, 96), "deepseek4v": Shape(84, 56),
    "dots3note_v": Shape(56, 84), "mimovl": Shape(128, 96), "ldp": Shape(336, 336),
    "ldpv2": Shape(336, 336), "yasa2": Shape(256, 256),
    "granite4_vision": Shape(3 * 128, 128, flags=(0, 0, 0, 2, 1, 100, 45, 0)),
    "granite_speech": Shape(160, 50, True), "granite_speech-plus": Shape(160, 50, True),
    "gemma3nv": Shape(512, 512), "mimo_audio": Shape(80, 122, True), "lfm2a": Shape(128, 150, True),
    "parakeet": Shape(128, 150, True),
}  # fmt: skip
# Tensor names and their values, where u is uniform between -1 and 1; the first rule that fits.
_EMBEDDED = re.compile(
    r"position_embd|class_embd|pos_emb|query|image_newline|view_seperator|image_begin|image_end|token_embd\.|\.boi$|\.eoi$"
    r"|pos_bias|rel_pos|attn\.pos_|codebook|img_pos|code_embd"
)
_ATTENDED = re.compile(r"attn[._](q|k|qkv)\.|attn_(q|k|qkv)\.|attn\.(query|key)")


def uniform(name: str, count: int, seed: int) -> np.ndarray:
    bits = np.random.PCG64(zlib.crc32(name.encode()) * 1000003 + seed).random_raw(count)
    return (bits >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0


def values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the values of a tensor, float64, in storage order; the shape has the fastest dimension first."""
    u, last = uniform(name, math.prod(shape), seed), name.rpartition(".")[2]
    if last.endswith(("_max", "_min")):
        return (1.0 if last.endswith("max") else -1.0) * (1.25 if last[0] == "i" else 1.0) + (
            0.5 * u if last.endswith("max") else -0.5 * u
        )
    if name.endswith("conv_norm_var"):
        return np.asarray(1 + 0.5 * u)
    if last == "bias" or name.endswith("conv_norm_mean") or name == "v.std_bias":
        return np.asarray(0.3 * u)
    if "exp_probs_b" in name:
        return np.asarray(0.1 * u)
    if name.endswith("attn_sinks"):
        return np.asarray(4 + u)
    if _EMBEDDED.search(name) and not name.endswith(".proj.weight"):
        return u
    if (last == "weight" and len(shape) == 1) or "gamma" in name or name == "v.std_scale":
        return np.asarray(1 + 0.25 * u)
    fan_in = math.prod(shape[:-1]) if len(shape) >= 3 and "_exps" not in name else shape[0]
    return np.asarray(u * (math.sqrt(3.0) * (2.0 if _ATTENDED.search(name) else 1.5) / math.sqrt(fan_in)))


@cache
def _stored() -> dict[str, np.ndarray]:
    with np.load(DATA) as z:
        return dict(z)


def loaded(name: str) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
    """Return the metadata and tensors of a case."""
    header = json.loads(_stored()[f"{name}.header"].tobytes())
    tensors = {}
    for tensor, shape, kind in header["tensors"]:
        own = values(tensor, tuple(shape), header["seed"]).reshape(shape[::-1])
        tensors[tensor] = MemoryWeight.of(tensor, own, "F16" if kind else "F32")
    return header["metadata"], tensors


def input_of(name: str) -> np.ndarray:
    """Return the input of a case: a picture (height, width, 3) or a spectrogram (bins, frames)."""
    own = SHAPES[name]
    shape = (own.rows, own.columns) if own.sound else (own.rows, own.columns, 3)
    return uniform(f"input of {name}", math.prod(shape), 1).reshape(shape).astype(np.float32)


def expected(name: str) -> np.ndarray:
    return _stored()[f"{name}.embeddings"]


def kind_of(name: str) -> str:
    return "audio" if SHAPES[name].sound else "vision"
