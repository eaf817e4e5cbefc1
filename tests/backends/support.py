"""Helpers for tests of the CPU backend: random matrices in every format, tiny models, one plan on two backends."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from localllm import quant
from localllm.backends.base import F16_CACHE, Backend, CacheTypes, Executable, Limits
from localllm.plan import BLOCK, Plan, Recorder, Value
from tests.models.support import Driver, MemoryWeight, plan_of

Build = Callable[[Recorder, Value], Value]
UNIT = 2.0**-24  # largest relative error of rounding to float32


def stored(name: str, format: str, shape: tuple[int, int], low: float = 0.5, high: float = 64.0) -> MemoryWeight:
    """Return a matrix of random bytes. Blocks are uniform among the blocks with a largest magnitude from `low` to
    `high`.

    Every bit of the format is used, and scales and minimums have both signs. Equal arguments give equal matrices.
    """
    rows, columns = shape
    fmt = quant.FORMATS[format]
    if fmt.block_values == 1:
        random = np.random.RandomState(zlib.crc32(f"{name} {shape}".encode()))
        return MemoryWeight.of(name, random.standard_normal(shape), format)
    random = np.random.RandomState(zlib.crc32(f"{name} {format} {shape}".encode()))
    wanted = rows * columns // fmt.block_values
    found = np.empty((0, fmt.block_bytes), np.uint8)
    while len(found) < wanted:
        blocks = random.randint(0, 256, (8 * wanted, fmt.block_bytes), np.uint8)
        largest = np.abs(quant.dequantize(blocks, format)).max(axis=1)
        with np.errstate(invalid="ignore"):  # a NaN counts as out of range
            found = np.concatenate([found, blocks[(largest >= low) & (largest <= high)]])
    return MemoryWeight(name, format, shape, found[:wanted].reshape(rows, -1))


def record(table: MemoryWeight, build: Build) -> Plan:
    """Return the plan that applies `build` to the embedding of a token."""
    r = Recorder()
    return r.finish(build(r, r.embed(table)))


def bind(backend: Backend, plan: Plan, rows: int = 80, blocks: int = 8, cache: CacheTypes = F16_CACHE) -> Executable:
    return backend.bind(plan, Limits(rows, rows, blocks, blocks * BLOCK), cache)


def chunks(total: int, sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of chunks with these sizes, then of one chunk for the remaining tokens. Sizes past
    the end are dropped.
    """
    cuts = [0]
    for size in sizes:
        cuts.append(min(cuts[-1] + size, total))
    cuts.append(total)
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def feed(executable: Executable, tokens: np.ndarray, sizes: Iterable[int] = ()) -> np.ndarray:
    """Return the results of every token of a new sequence, evaluated in chunks of the given sizes and one
    chunk for the remaining tokens.
    """
    driver = Driver(executable)
    return np.concatenate([driver.step([(0, tokens[a:b])]) for a, b in chunks(len(tokens), sizes)])


@dataclass(frozen=True)
class Shape:
    """The shape of a small llama or qwen3. Widths are multiples of 32, so that most formats apply."""

    architecture: str = "llama"
    width: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    vocabulary: int = 97
    context: int = 512
    biased: bool = False
    tied: bool = False


LLAMA = Shape()
Formats = str | Callable[[str], str]  # one format for all matrices, or a function of the tensor name
Model = tuple[dict[str, Any], dict[str, MemoryWeight]]


def model(format: Formats, shape: Shape = LLAMA, seed: int = 1) -> Model:
    """Return the metadata and tensors of a random model."""
    s, random = shape, np.random.RandomState(seed)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    matrices = {"token_embd": (s.vocabulary, s.width)}
    vectors = {"output_norm": s.width}
    if not s.tied:
        matrices["output"] = (s.vocabulary, s.width)
    for layer in range(s.layers):
        name = f"blk.{layer}."
        matrices |= {
            name + "attn_q": (q, s.width),
            name + "attn_k": (kv, s.width),
            name + "attn_v": (kv, s.width),
            name + "attn_output": (s.width, q),
            name + "ffn_gate": (s.ffn, s.width),
            name + "ffn_up": (s.ffn, s.width),
            name + "ffn_down": (s.width, s.ffn),
        }
        vectors |= {name + "attn_norm": s.width, name + "ffn_norm": s.width}
        if s.architecture == "qwen3":
            vectors |= {name + "attn_q_norm": s.head_dim, name + "attn_k_norm": s.head_dim}
    choose = format if callable(format) else lambda name: format
    tensors = {}
    for name, (rows, columns) in matrices.items():
        gain = 2.0 if name.endswith(("attn_q", "attn_k")) else 1.0  # attention to few positions
        values = random.standard_normal((rows, columns)) * (gain / math.sqrt(columns))
        tensors[name + ".weight"] = MemoryWeight.of(name + ".weight", values, choose(name + ".weight"))
        if s.biased and name.endswith(("attn_q", "attn_k", "attn_v", "ffn_down")):
            tensors[name + ".bias"] = MemoryWeight.of(name + ".bias", 0.3 * random.standard_normal(rows))
    for name, width in vectors.items():
        tensors[name + ".weight"] = MemoryWeight.of(name + ".weight", 1.0 + 0.2 * random.standard_normal(width))
    keys = {
        "block_count": s.layers,
        "context_length": s.context,
        "embedding_length": s.width,
        "feed_forward_length": s.ffn,
        "vocab_size": s.vocabulary,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {"general.architecture": s.architecture, **{f"{s.architecture}.{k}": v for k, v in keys.items()}}
    return metadata, tensors


def plan(format: Formats, shape: Shape = LLAMA, seed: int = 1) -> Plan:
    return plan_of(*model(format, shape, seed))


def tokens(count: int, vocabulary: int = 97, seed: int = 5) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, vocabulary, count)


def check_company(backends: Sequence[Backend], plan: Plan, cache: CacheTypes, tokens: np.ndarray) -> np.ndarray:
    """Check on three backends that a token's logits do not depend on its batch, and return the logits (T, vocabulary).

    A long prompt runs at once. Then its last tokens run in other chunks, together with another sequence.
    """
    blocks, long = 2 * (len(tokens) // BLOCK + 1), len(tokens)
    bound = [bind(backend, plan, rows=long + 50, blocks=blocks, cache=cache) for backend in backends]
    truth = Driver(bound[0]).step([(0, tokens)])
    for executable, cuts in zip(bound, ([1] * 6, [1, 7, 2, 20], [3, 1, 1, 30, 4]), strict=True):
        driver, at = Driver(executable, sequences=2), long - sum(cuts)
        driver.step([(1, tokens[:50]), (0, tokens[:at])])
        for count in cuts:
            rows = driver.step([(1, tokens[:2]), (0, tokens[at : at + count])])[2:]
            np.testing.assert_array_equal(rows, truth[at : at + count])
            at += count
        executable.close()
    return truth
