"""Writes the files of `encoders.py` and `encoder_profile.py`: encoders with true shapes and random weights, and small
text models, without which llama.cpp loads no encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.gguf import NewTensor, write_gguf
from localllm.quant import quantize

HALF = ("patch_embd", "attn", "ffn", "fc", "mm.", "projection")  # names of tensors in F16, unless they are biases
BOUNDS = {"input_min": -8.0, "input_max": 8.0, "output_min": -8.0, "output_max": 8.0}
MARKERS = ("<unk>", "<s>", "</s>", "<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>", "<global-img>")


@dataclass(frozen=True, slots=True)
class Shape:
    """An encoder: its projector type, sizes, and the width of the text model."""

    projector: str
    layers: int
    width: int
    ffn: int
    heads: int
    patch: int
    image: int
    text: int
    keys: dict[str, Any]
    deep: tuple[int, ...] = ()  # layers whose outputs are projected, too
    exact: tuple[str, ...] = ("position",)  # parts of the names of matrices that the converter writes in F32
    vocabulary: str = "qwen2"  # of the files ggml-vocab-*.gguf in llama.cpp's folder `models`, for --turns

    @property
    def architecture(self) -> str:
        return "qwen3vl" if self.projector == "qwen3vl_merger" else "llama"


# Sizes from transformers 5.24: the defaults of Qwen3VLVisionConfig (8B) and of Gemma4VisionConfig (E4B). Gemma 4 E4B
# clips inputs and outputs of products. Qwen3-VL 2B contains SigLIP 2 large, and SmolVLM2 500M contains SigLIP base.
QWEN = {"clip.vision.spatial_merge_size": 2, "clip.use_gelu": True}
SHAPES = {
    "smolvlm": Shape(
        "idefics3", 12, 768, 3072, 12, 16, 512, 960,
        {"clip.vision.projector.scale_factor": 4, "clip.vision.preproc_image_size": 2048, "clip.use_gelu": True},
        exact=("position", "patch_embd"), vocabulary="llama-bpe",
    ),
    "qwen3vl-2b": Shape("qwen3vl_merger", 24, 1024, 4096, 16, 16, 768, 2048, QWEN, (5, 11, 17)),
    "gemma3-4b": Shape("gemma3", 27, 1152, 4304, 16, 14, 896, 2560, {}, vocabulary="gemma-4"),
    "gemma4-e4b": Shape("gemma4v", 16, 768, 3072, 12, 16, 224, 2560, {}, vocabulary="gemma-4"),
    "qwen3vl-8b": Shape("qwen3vl_merger", 27, 1152, 4304, 16, 16, 768, 4096, QWEN, (8, 16, 24)),
}  # fmt: skip


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors of an mmproj file."""
    width, ffn, text = shape.width, shape.ffn, shape.text
    qwen = shape.projector == "qwen3vl_merger"
    kernel = (width, 3, shape.patch, shape.patch)
    if shape.projector == "gemma4v":
        yield from gemma4_tensors(shape, kernel)
        return
    yield from [("v.patch_embd.weight", kernel), ("v.patch_embd.bias", (width,))]
    if qwen:
        yield "v.patch_embd.weight.1", kernel
    yield "v.position_embd.weight", ((shape.image // shape.patch) ** 2, width)
    for n in range(shape.layers):
        products = {"attn_out": (width, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
        products |= (
            {"attn_qkv": (3 * width, width)} if qwen else dict.fromkeys(("attn_q", "attn_k", "attn_v"), (width,) * 2)
        )
        for name, size in products.items():
            yield from [(f"v.blk.{n}.{name}.weight", size), (f"v.blk.{n}.{name}.bias", size[:1])]
        for name in ("ln1", "ln2"):
            yield from [(f"v.blk.{n}.{name}.weight", (width,)), (f"v.blk.{n}.{name}.bias", (width,))]
    yield from [("v.post_ln.weight", (width,)), ("v.post_ln.bias", (width,))]
    if shape.projector == "gemma3":
        yield from [("mm.soft_emb_norm.weight", (width,)), ("mm.input_projection.weight", (width, text))]
        return
    if not qwen:
        yield "mm.model.fc.weight", (text, width * shape.keys["clip.vision.projector.scale_factor"] ** 2)
        return
    cell = 4 * width
    for n in shape.deep:
        at = f"v.deepstack.{n}"
        yield from [(f"{at}.norm.weight", (cell,)), (f"{at}.norm.bias", (cell,))]
        yield from [(f"{at}.fc1.weight", (cell, cell)), (f"{at}.fc1.bias", (cell,))]
        yield from [(f"{at}.fc2.weight", (text, cell)), (f"{at}.fc2.bias", (text,))]
    yield from [
        ("mm.0.weight", (cell, cell)),
        ("mm.0.bias", (cell,)),
        ("mm.2.weight", (text, cell)),
        ("mm.2.bias", (text,)),
    ]


def gemma4_tensors(shape: Shape, kernel: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn = shape.width, shape.ffn
    yield from [("v.patch_embd.weight", kernel), ("v.position_embd.weight", (2, 10240, width))]
    for n in range(shape.layers):
        products = {"attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width)}
        products |= {"attn_out": (width, width), "ffn_up": (ffn, width), "ffn_gate": (ffn, width)}
        for name, size in (products | {"ffn_down": (width, ffn)}).items():
            yield f"v.blk.{n}.{name}.weight", size
            yield from [(f"v.blk.{n}.{name}.{bound}", (1,)) for bound in BOUNDS]
        for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            yield f"v.blk.{n}.{name}.weight", (width,)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"v.blk.{n}.{name}.weight", (width // shape.heads,)
    yield "mm.input_projection.weight", (shape.text, width)


def new_tensor(
    name: str, size: tuple[int, ...], random: np.random.Generator, exact: tuple[str, ...] = (), format: str = "F16"
) -> NewTensor:
    """Return random values, scaled so that the outputs of products have about the size of their inputs."""
    bound = BOUNDS.get(name.rpartition(".")[2])
    if bound is not None:
        values = np.full(size, bound, np.float32)
    elif len(size) > 1:
        values = random.standard_normal(size, np.float32) / np.float32(np.sqrt(np.prod(size[1:])))
    else:
        values = 0.1 * random.standard_normal(size, np.float32) + np.float32(name.endswith("weight"))
    half = len(size) > 1 and any(part in name for part in HALF) and not any(part in name for part in exact)
    if half and format == "Q8_0" and size[-1] % 32 == 0 and len(size) == 2:
        return NewTensor(name, format, size, quantize(values, format))
    data = values.astype(np.float16) if half else values.astype(np.float32)
    return NewTensor(name, "F16" if half else "F32", size, data.reshape(-1).view(np.uint8))


def write_files(name: str, folder: Path, format: str = "F16") -> tuple[Path, Path]:
    """Write the mmproj file and the small text model without which llama.cpp does not load it."""
    shape, random = SHAPES[name], np.random.default_rng(1)
    ending = "mmproj" if format == "F16" else f"mmproj-{format}"
    exact = shape.exact if format == "F16" else (*shape.exact, "patch_embd")
    projector, text = folder / f"{name}-{ending}.gguf", folder / f"{name}-text.gguf"
    if not projector.exists():
        sizes = {
            "image_size": shape.image, "patch_size": shape.patch, "embedding_length": shape.width,
            "feed_forward_length": shape.ffn, "block_count": shape.layers, "attention.head_count": shape.heads,
            "attention.layer_norm_epsilon": 1e-6, "projection_dim": shape.text,
        }  # fmt: skip
        mean = 0.0 if shape.projector == "gemma4v" else 0.5
        metadata = {
            "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": shape.projector,
            "clip.vision.image_mean": np.full(3, mean, np.float32),
            "clip.vision.image_std": np.full(3, 1.0 - mean, np.float32),
        } | {f"clip.vision.{key}": value for key, value in sizes.items()} | shape.keys  # fmt: skip
        if shape.deep:
            deep = np.isin(np.arange(shape.layers), shape.deep)
            metadata["clip.vision.is_deepstack_layers"] = deep
        write_gguf(projector, metadata, [new_tensor(*each, random, exact, format) for each in tensors(shape)])
    if not text.exists():
        write_text(shape, text, random)
    return projector, text


def write_text(shape: Shape, path: Path, random: np.random.Generator) -> None:
    a, width, layers = shape.architecture, shape.text, max(len(shape.deep), 1)
    tokens = [*MARKERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"<unused{n}>" for n in range(512 - len(tokens))]
    kinds = np.array([2, 3, 3, *[3] * (len(MARKERS) - 3), *[6] * 256, *[5] * (512 - len(MARKERS) - 256)], np.int32)
    metadata: dict[str, Any] = {
        "general.architecture": a, f"{a}.vocab_size": 512, f"{a}.context_length": 8192, f"{a}.embedding_length": width,
        f"{a}.block_count": layers, f"{a}.feed_forward_length": 64, f"{a}.attention.head_count": 2,
        f"{a}.attention.head_count_kv": 2, f"{a}.attention.key_length": 16, f"{a}.attention.value_length": 16,
        f"{a}.rope.dimension_count": 16, f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.rope.freq_base": 1e4,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(512, np.float32), "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (512, width), "output_norm.weight": (width,)}
    for n in range(layers):
        sizes |= {
            f"blk.{n}.attn_norm.weight": (width,), f"blk.{n}.attn_q.weight": (32, width),
            f"blk.{n}.attn_k.weight": (32, width), f"blk.{n}.attn_v.weight": (32, width),
            f"blk.{n}.attn_output.weight": (width, 32), f"blk.{n}.ffn_norm.weight": (width,),
            f"blk.{n}.ffn_gate.weight": (64, width), f"blk.{n}.ffn_up.weight": (64, width),
            f"blk.{n}.ffn_down.weight": (width, 64),
        }  # fmt: skip
        if a == "qwen3vl":
            sizes |= {f"blk.{n}.attn_q_norm.weight": (16,), f"blk.{n}.attn_k_norm.weight": (16,)}
    if a == "qwen3vl":
        metadata |= {
            "qwen3vl.rope.dimension_sections": np.array([4, 2, 2, 0], np.int32),
            "qwen3vl.n_deepstack_layers": len(shape.deep),
        }
    write_gguf(path, metadata, [new_tensor(*each, random) for each in sizes.items()])
