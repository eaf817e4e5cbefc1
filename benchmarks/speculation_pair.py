"""Write a 1B-class model and a small draft model with given acceptance rates, to time speculative decoding.

    python benchmarks/speculation_pair.py FOLDER --acceptance 60 80 95

Both models contain the bundled model, embedded in wider layers and padded with zeros, so that they generate text. The
target has twelve more layers of random weights. Their contribution to the residual stream is scaled until the draft's
top token equals the target's token at the given share of positions of the target's greedy answers. The GGUFs are in
Q4_0, with 0.54 GB and 24 MB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import localllm
from localllm.gguf import GGUFFile, NewTensor, open_gguf, write_gguf
from localllm.loading.resolve import resolve
from localllm.quant import dequantize, quantize

FORMAT = "Q4_0"
BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])  # a Q4_0 block
HEAD, WIDTH, LAYERS = 64, 512, 4  # geometry of the bundled model
HEADS, KV_HEADS = 8, 2
Floats = NDArray[np.float32]

PROMPTS = {
    "code": (
        "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b"
        "\n\n\ndef div(a, b):\n    return a / b\n\n\nfor name in names:\n    print(name)\n\n\ndef add_all(values):\n"
    ),
    "dialogue": (
        "<|im_start|>user<|im_sep|>I want to book a table for two in San Jose.<|im_end|><|im_start|>assistant<|im_sep|>"
        "What time would you like to make the reservation for?<|im_end|><|im_start|>user<|im_sep|>At 7 pm. What is the "
        "weather going to be like?<|im_end|><|im_start|>assistant<|im_sep|>"
    ),
    "prose": (
        "Once upon a time, there was a little girl named Lily. She had a small red ball that she loved very much. One "
        "day, Lily went to the park with her mom. The sun was warm and the birds were singing in the trees. At the park"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The geometry in which the bundled model is embedded."""

    width: int
    ffn: int
    heads: int
    kv_heads: int
    extra: int  # number of random layers after the bundled model's four


TARGET = Shape(2048, 8192, 32, 8, 12)
DRAFT = Shape(1024, 2048, 16, 4, 0)


def numbers(box: GGUFFile, name: str) -> Floats:
    tensor = box.tensors[name]
    return dequantize(tensor.read(0, tensor.rows), tensor.format)


def into(values: Floats, rows: int, columns: int, row_at: list[int] | None = None) -> Floats:
    """Return zeros with `values` in the corner, or with blocks of 64 rows of `values` at `row_at`."""
    result = np.zeros((rows, columns), np.float32)
    if row_at is None:
        result[: values.shape[0], : values.shape[1]] = values
    else:
        for i, at in enumerate(row_at):
            result[at * HEAD : (at + 1) * HEAD, : values.shape[1]] = values[i * HEAD : (i + 1) * HEAD]
    return result


def layer_tensors(box: GGUFFile, shape: Shape, layer: int) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of one layer of the bundled model, widened.

    Norm weights compensate for the zeros in the average.
    """

    def read(name: str) -> Floats:
        return numbers(box, f"blk.{layer}.{name}.weight")

    group, own = shape.heads // shape.kv_heads, HEADS // KV_HEADS
    q_at = [h // own * group + h % own for h in range(HEADS)]
    width, q_rows, kv_rows = shape.width, shape.heads * HEAD, shape.kv_heads * HEAD
    yield "attn_q", into(read("attn_q"), q_rows, width, q_at)
    yield "attn_k", into(read("attn_k"), kv_rows, width)
    yield "attn_v", into(read("attn_v"), kv_rows, width)
    yield "attn_output", into(read("attn_output").T, q_rows, width, q_at).T.copy()
    yield "ffn_gate", into(read("ffn_gate"), shape.ffn, width)
    yield "ffn_up", into(read("ffn_up"), shape.ffn, width)
    yield "ffn_down", into(read("ffn_down"), width, shape.ffn)
    for name in ("attn_norm", "ffn_norm"):
        yield name, widened(read(name), width)


def widened(norm: Floats, width: int) -> Floats:
    result = np.ones((1, width), np.float32)
    result[0, :WIDTH] = norm.ravel() * np.sqrt(WIDTH / width)
    return result


def random_tensors(shape: Shape, rng: np.random.Generator) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of a random layer that writes to the dimensions in use."""
    kv = shape.kv_heads * HEAD
    for name, rows, columns in (
        ("attn_q", shape.width, shape.width), ("attn_k", kv, shape.width), ("attn_v", kv, shape.width),
        ("attn_output", shape.width, shape.width), ("ffn_gate", shape.ffn, shape.width),
        ("ffn_up", shape.ffn, shape.width), ("ffn_down", shape.width, shape.ffn),
    ):  # fmt: skip
        values = rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))
        if name in ("attn_output", "ffn_down"):
            values[WIDTH:] = 0
        yield name, values
    for name in ("attn_norm", "ffn_norm"):
        yield name, np.full((1, shape.width), np.sqrt(WIDTH / shape.width), np.float32)


def tensors(box: GGUFFile, shape: Shape) -> Iterator[NewTensor]:
    rng = np.random.default_rng(0)

    def new(name: str, values: Floats) -> NewTensor:
        if len(values) == 1:
            return NewTensor(name, "F32", (shape.width,), values[0].view(np.uint8))
        return NewTensor(name, FORMAT, values.shape, quantize(values, FORMAT))

    values = numbers(box, "token_embd.weight")
    yield new("token_embd.weight", into(values, len(values), shape.width))
    for layer in range(LAYERS + shape.extra):
        parts = layer_tensors(box, shape, layer) if layer < LAYERS else random_tensors(shape, rng)
        for name, values in parts:
            yield new(f"blk.{layer}.{name}.weight", values)
    yield new("output_norm.weight", widened(numbers(box, "output_norm.weight"), shape.width))


def write(path: Path, shape: Shape) -> None:
    with open_gguf(resolve("demo")) as box:
        found: dict[str, Any] = {k: v.to_list() if hasattr(v, "to_list") else v for k, v in box.metadata.items()}
        found |= {
            "general.name": path.stem,
            "llama.block_count": LAYERS + shape.extra,
            "llama.context_length": 4096,
            "llama.embedding_length": shape.width,
            "llama.feed_forward_length": shape.ffn,
            "llama.attention.head_count": shape.heads,
            "llama.attention.head_count_kv": shape.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": found["llama.attention.layer_norm_rms_epsilon"]
            * WIDTH / shape.width,
        }  # fmt: skip
        found.pop("general.size_label", None)
        write_gguf(path, found, tensors(box, shape), overwrite=True)


class Scales:
    """The block scales of the extra layers' outputs, which are multiplied in place in the GGUF."""

    def __init__(self, path: Path) -> None:
        self._path = path
        names = {
            f"blk.{layer}.{name}.weight"
            for layer in range(LAYERS, LAYERS + TARGET.extra)
            for name in ("attn_output", "ffn_down")
        }
        with open_gguf(path) as file:
            found = [tensor for tensor in file.tensors.values() if tensor.name in names]
        self._places = [(tensor._offset, tensor.shape[1] // 32 * WIDTH) for tensor in found]
        self._base = [self._blocks(*place)["scale"].astype(np.float32) for place in self._places]

    def _blocks(self, offset: int, count: int) -> np.memmap[Any, Any]:
        return np.memmap(self._path, BLOCK, "r+", offset, (count,))

    def set(self, factor: float) -> None:
        for place, base in zip(self._places, self._base, strict=True):
            blocks = self._blocks(*place)
            blocks["scale"] = base * np.float32(factor)
            blocks.flush()


def agreement(target: Path, draft: Path, tokens: int) -> float:
    """Return the share of tokens in the target's greedy answers that are also the draft's top token."""
    same = seen = 0
    with localllm.load(target, ctx_size=512) as model, localllm.load(draft, ctx_size=512) as small:
        for prompt in PROMPTS.values():
            ids = model.tokenize(prompt, parse_special=True)
            said = model.generate(ids, max_tokens=tokens, ignore_eos=True, temperature=0).tokens
            likeliest = small.logits(ids + said)[len(ids) - 1 : -1].argmax(axis=1)
            same, seen = same + int((likeliest == said).sum()), seen + tokens
    return same / seen


def tune(target: Path, draft: Path, wanted: float, tokens: int) -> tuple[float, float]:
    """Scale the target's extra layers. Return the factor and the agreement."""
    scales, low, high = Scales(target), 1.0, 16.0
    best = (0.0, 1.0)
    for _ in range(9):
        factor = float(np.sqrt(low * high))
        scales.set(factor)
        found = agreement(target, draft, tokens)
        print(f"{target.name}: factor {factor:.4f}, agreement {found:.3f}", file=sys.stderr)
        if abs(found - wanted) < abs(best[1] - wanted):
            best = factor, found
        if abs(found - wanted) < 0.02:
            break
        low, high = (factor, high) if found > wanted else (low, factor)
    scales.set(best[0])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--acceptance", type=int, nargs="+", default=[60, 80, 95], help="per cent")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer to compare")
    arguments = parser.parse_args()
    draft, base = arguments.folder / "draft.gguf", arguments.folder / "base.gguf"
    write(draft, DRAFT)
    write(base, TARGET)
    for share in arguments.acceptance:
        target = arguments.folder / f"target-{share}.gguf"
        shutil.copy(base, target)
        factor, found = tune(target, draft, share / 100, arguments.tokens)
        print(f"{target}: factor {factor:.4f}, the draft agrees in {found:.1%} of the positions")
    base.unlink()


if __name__ == "__main__":
    main()
