"""Base models for fuzzing: a tiny model of every architecture with a tokenizer, and consistent models of odd shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from localllm import quant
from localllm.gguf import NewTensor, write_gguf
from localllm.models import ARCHITECTURES, ModelError, architecture_of, read_config, record
from tests.fuzz.image import Array, Image, decode
from tests.localllm.support import CHATML
from tests.models.tiny import VARIANTS, Model
from tests.models.tiny_families import FAMILIES

_EXPECTED = re.compile(r"([\w.]+): .*expected shape \(([\d, ]+)\)")
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64", "F64")
# Head dimension, KV heads, query heads per KV head. There are few shapes, because attention kernels are
# compiled for each.
_HEADS = (
    *((2, 4, 2), (6, 1, 5), (8, 2, 2), (16, 1, 1), (17, 1, 3), (33, 2, 1), (40, 1, 8), (63, 1, 1), (64, 2, 4)),
    *((65, 3, 1), (80, 1, 2), (128, 1, 3), (256, 1, 1)),
)
_MOST_BYTES = 1 << 20  # largest tensor of an odd model, in bytes
_STRING, _UINT32, _INT32, _FLOAT32, _BOOL = 8, 4, 5, 6, 7


def sentencepiece(size: int) -> dict[str, Any]:
    """Return a vocabulary of `size` tokens: letters, then byte tokens."""
    few = ["<unk>", "<s>", "</s>", "\u2581", "<|im_start|>", "<|im_end|>"]
    letters = [chr(c) for c in range(97, 123)] + ["th", "he", "\u2581t", "in", "er"]
    room = max(0, min(256, size - len(few) - len(letters)))
    tokens = [*few, *(f"<0x{b:02X}>" for b in range(room)), *letters]
    kinds = [2, 3, 3, 1, 3, 3, *[6] * room, *[1] * len(letters)]
    tokens += [f"w{i}" for i in range(size - len(tokens))]
    kinds += [1] * (size - len(kinds))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens[:size],
        "tokenizer.ggml.scores": -np.arange(size, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(kinds[:size], np.int32),
        "tokenizer.ggml.bos_token_id": min(1, size - 1),
        "tokenizer.ggml.eos_token_id": min(2, size - 1),
        "tokenizer.ggml.add_bos_token": True,
    }


def byte_level(size: int, rule: str) -> dict[str, Any]:
    """Return a BPE vocabulary of `size` tokens with the pre-tokenizer `rule`."""
    printable = [chr(c) for c in (*range(97, 123), *range(33, 97), *range(123, 127), *range(161, 173))]
    rest = [chr(c) for c in range(0x100, 0x144)] + [chr(c) for c in range(174, 256)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *printable, *rest, "th", "he", "the", "in", "er"]
    tokens += [f"w{i}" for i in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens[:size],
        "tokenizer.ggml.token_type": np.array([3, 3, 3, *[1] * size][:size], np.int32),
        "tokenizer.ggml.merges": ["t h", "h e", "th e", "i n", "e r"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def tokenizer(random: Random, size: int) -> dict[str, Any]:
    if random.random() < 0.4:
        return sentencepiece(size)
    return byte_level(size, random.choice(("default", "gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-llm")))


def bases(home: Path) -> dict[str, Image]:
    """Return the tiny models by name, each with a tokenizer and a chat template."""
    found, random = {}, Random(0)
    for name, make in {**VARIANTS, **FAMILIES}.items():
        metadata, weights = make()
        size = weights["token_embd.weight"].shape[0]
        more = {**tokenizer(random, size), "tokenizer.chat_template": CHATML, "general.name": name}
        found[name] = image_of((metadata, weights), more, home / "base.gguf")
    return found


def image_of(model: Model, more: Mapping[str, Any], path: Path) -> Image:
    metadata, weights = model
    tensors = [NewTensor(w.name, w.format, w.shape, np.ascontiguousarray(w.rows)) for w in weights.values()]
    keys = {
        key: np.array(value) if type(value) is list and type(value[0]) is bool else value
        for key, value in {**metadata, **more}.items()
    }
    write_gguf(path, keys, tensors, overwrite=True)
    return decode(path.read_bytes())


# -- odd shapes ----------------------------------------------------------------------------------------------------


@dataclass
class _Wanted:
    """A tensor to create. Its values matter only if the plan requires finite values."""

    name: str
    format: str
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.zeros((stop - start, quant.row_bytes(self.format, self.shape[-1])), np.uint8)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * quant.row_bytes(self.format, self.shape[-1])


class _Draw:
    """One random model. Sizes are drawn so that all checks pass, then the tensors that the model code reports
    missing.
    """

    def __init__(self, random: Random) -> None:
        self.random, pick = random, random.choice
        self.architecture = ARCHITECTURES[pick(sorted(ARCHITECTURES))]
        self.head_dim, self.kv_heads, self.group = pick(_HEADS)
        self.width = pick((1, 2, 3, 16, 17, 31, 32, 33, 63, 64, 96, 100, 128, 160, 256, 256, 256, 512))
        self.ffn = pick((1, 2, 15, 16, 17, 32, 33, 64, 96, 128, 256, 256, 300))
        self.layers, self.vocabulary = pick((1, 1, 2, 3)), pick((6, 15, 16, 17, 31, 33, 64, 100, 128, 257, 300))
        self.experts = pick((1, 2, 3, 4, 15, 16, 17, 33)) if self.architecture.routing and random.random() < 0.7 else 0
        self.inner = pick((1, 16, 17, 32, 48, 64, 256))
        self.weights = pick(("sane", "sane", "sane", "any", "nan", "zero"))
        self.format = pick((None, None, *(f for f in quant.FORMATS if f not in _NOT_WEIGHTS)))

    def keys(self) -> dict[str, Any]:
        random, pick, prefix = self.random, self.random.choice, f"{self.architecture.name}."
        rotated = [n for n in (2, 4, 8, self.head_dim, self.head_dim // 2) if n and n % 2 == 0 and n <= self.head_dim]
        keys: dict[str, Any] = {
            "block_count": self.layers,
            "embedding_length": self.width,
            "context_length": pick((1, 2, 64, 256, 2**30)),
            "feed_forward_length": self.ffn,
            "attention.head_count": self.kv_heads * self.group,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": pick((1e-5, 1e-5, 1e-19, 0.99)),
            "attention.layer_norm_epsilon": pick((1e-5, 1e-5, 0.99)),
            "attention.sliding_window": pick((0, 1, 2, 5, 63, 64, 65, 200, 2**30)),
            "rope.dimension_count": pick(rotated),
            "rope.freq_base": pick((10000.0, 1.01, 1e29)),
            "rope.scaling.type": pick(("none", "linear", "yarn", "longrope")),
            "rope.scaling.factor": pick((0.0, 1.0, 4.0, 1e-6, 1e6)),
            "rope.scaling.original_context_length": pick((0, 1, 64, 4096)),
        }
        if random.random() < 0.5:
            keys["attention.sliding_window_pattern"] = pick((1, 2))
        if self.architecture.multipliers:
            for name in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
                keys[name] = pick((0.0, 1.0, 0.01, 1e6))
        if self.experts:
            used = pick((1, self.experts, min(self.experts, 2), max(1, self.experts - 1)))
            keys |= {"expert_count": self.experts, "expert_used_count": used, "expert_weights_scale": pick((0.0, 2.5))}
            keys |= {"expert_gating_func": pick((0, 1, 2, 3)), "expert_weights_norm": pick((True, False))}
        return {"general.architecture": self.architecture.name} | {prefix + key: keys[key] for key in keys}

    def optional(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield tensors that only some models have."""
        q, kv, wide = self.kv_heads * self.group * self.head_dim, self.kv_heads * self.head_dim, self.width
        parts = {"attn_q": q, "attn_k": kv, "attn_v": kv, "attn_output": wide, "attn_norm": wide, "ffn_norm": wide}
        up = self.ffn * (2 if self.architecture.ffn == "fused" else 1)
        parts |= {"ffn_up": up, "ffn_gate": self.ffn, "ffn_down": wide}
        found: dict[str, tuple[int, ...]] = {f"{part}.bias": (size,) for part, size in parts.items()}
        found |= {"attn_qkv.weight": (q + 2 * kv, wide), "attn_qkv.bias": (q + 2 * kv,)}
        found |= {"attn_sinks.weight": (self.kv_heads * self.group,), "ffn_up.scale": (1,), "attn_q.scale": (1,)}
        if self.random.random() < 0.3:
            found |= {"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)}
        if self.experts:
            yield from self._experts(layer)
        yield from ((f"blk.{layer}.{n}", s) for n, s in found.items() if self.random.random() < 0.25)

    def _experts(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        count, inner, wide = self.experts, self.inner, self.width
        must: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (count, wide)}
        may: dict[str, tuple[int, ...]] = {"exp_probs_b.bias": (count,), "ffn_gate_inp.bias": (count,)}
        for part, size in (("up", inner), ("gate", inner), ("down", wide)):
            must[f"ffn_{part}_exps.weight"] = (count, size, inner if part == "down" else wide)
            may |= {f"ffn_{part}_exps.bias": (count, size), f"ffn_{part}_exps.scale": (count,)}
        may["ffn_gate_inp_shexp.weight"] = (wide,)
        yield from ((f"blk.{layer}.{n}", s) for n, s in must.items())
        yield from ((f"blk.{layer}.{n}", s) for n, s in may.items() if self.random.random() < 0.4)

    def format_of(self, name: str, columns: int) -> str:
        if name.endswith(".scale") or name.startswith("rope_f"):
            return "F32"
        if self.format and columns % quant.FORMATS[self.format].block_values == 0 and self.random.random() < 0.85:
            return self.format
        fitting = [f for f, of in quant.FORMATS.items() if columns % of.block_values == 0 and f not in _NOT_WEIGHTS]
        return self.random.choice(fitting)

    def data(self, tensor: _Wanted, numbers: np.random.Generator) -> bytes:
        size, format_ = tensor.nbytes, quant.FORMATS[tensor.format]
        if tensor.name.endswith(".scale") or tensor.name.startswith("rope_f"):
            return np.full(size // 4, 1.5, np.float32).tobytes()
        if self.weights == "zero":
            return bytes(size)
        if self.weights == "nan" and self.random.random() < 0.5:
            return b"\xff" * size
        if self.weights == "any":
            return numbers.bytes(size)
        if format_.block_values > 1:  # keep scales small
            return (numbers.integers(0, 256, size, np.uint8) & 0x3B).tobytes()
        values = numbers.standard_normal(size // format_.block_bytes, np.float32) * np.float32(0.1)
        if tensor.format == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float16 if tensor.format == "F16" else np.float32).tobytes()


def odd(random: Random) -> tuple[Image, str]:
    """Return a model with odd but consistent shapes and formats, and a line that describes it."""
    while True:
        draw = _Draw(random)
        keys = draw.keys()
        wanted = _complete(draw, {**keys, f"{draw.architecture.name}.vocab_size": draw.vocabulary})
        if wanted is not None and all(tensor.nbytes <= _MOST_BYTES for tensor in wanted.values()):
            break
    image, numbers = Image(), np.random.default_rng(random.randrange(2**32))
    if random.random() < 0.5:
        keys |= tokenizer(random, draw.vocabulary)
    else:
        keys[f"{draw.architecture.name}.vocab_size"] = draw.vocabulary
    for name, value in keys.items():
        image.set(name, *_typed(value))
    for tensor in wanted.values():
        image.add(tensor.name, tensor.shape, quant.FORMATS[tensor.format].type_id, draw.data(tensor, numbers))
    about = f"kv {draw.kv_heads} x {draw.group} of {draw.head_dim}, width {draw.width}, ffn {draw.ffn}/{draw.inner}"
    return image, f"{draw.architecture.name}: {about}, experts {draw.experts}, {draw.format}, {draw.weights}"


def _complete(draw: _Draw, keys: Mapping[str, Any]) -> dict[str, _Wanted] | None:
    """Add each tensor that the model code reports missing, and return all of them; None if no tensors fit."""
    shapes = dict(entry for layer in range(draw.layers) for entry in draw.optional(layer))
    if draw.random.random() < 0.5:
        shapes["output.weight"] = (draw.vocabulary, draw.width)
    tensors = {name: _Wanted(name, draw.format_of(name, shape[-1]), shape) for name, shape in shapes.items()}
    try:
        architecture = architecture_of(keys)
        config = read_config(keys, architecture.name)
    except ModelError:
        return None
    for _ in range(200):
        try:
            record(config, architecture, tensors)
            return tensors
        except ModelError as error:
            found = _EXPECTED.match(str(error))
            if not found:
                return None
            shape = tuple(int(n) for n in found[2].split(",") if n.strip())
            tensors[found[1]] = _Wanted(found[1], draw.format_of(found[1], shape[-1]), shape)
    return None


def _typed(value: Any) -> tuple[int, Any]:
    """Return the GGUF type of a value, and the value."""
    if isinstance(value, bool):
        return _BOOL, value
    if isinstance(value, int):
        return _UINT32, value
    if isinstance(value, float):
        return _FLOAT32, value
    if isinstance(value, str):
        return _STRING, value.encode()
    if isinstance(value, np.ndarray):
        return 9, Array(_FLOAT32 if value.dtype.kind == "f" else _INT32, value.tolist())
    return 9, Array(_STRING, [text.encode() for text in value])
