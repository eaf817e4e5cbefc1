"""Time latent attention (MLA) in prefill: its share of a model's time, and the savings of un-absorbed prefill.

    python benchmarks/latent.py [--sizes 512,2048,8192] [-t 2] [--rounds 2] [--model /tmp/v2-lite-3l.gguf]

The model has the shape of DeepSeek-V2-Lite, but only 3 of its 27 layers, a small vocabulary and random weights. It is
written to `--model` if it does not exist. The profile of a prompt gives the share of attention and of the matrices that
absorption adds. Then the attention of one layer runs alone, over the same steps of 512 tokens, in four forms.
"Absorbed" runs with F16 and with q8_0 caches. "Expanded" computes the heads' keys and values from every latent row
once, and keeps them in a cache 4.7 times as large. "Expanded again" recomputes them in every step, as a cache of latent
rows requires. The ratio of the attention times, weighted by the share, gives the model's saving. One JSON line per size
goes to benchmarks/results/latent.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from compare import RESULTS, ROOT, machine
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT))

from make_model import Rows, byte_vocabulary

import localllm
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend, CpuExecutable
from localllm.backends.cpu.kernels.executor import Entry
from localllm.gguf import NewTensor, write_gguf
from localllm.plan import BLOCK, Batch, Plan, Recorder

LAYERS, DENSE, OF_MODEL = 3, 1, 27
WIDTH, HEADS, RANK, PLAIN, ROTATED, VALUE = 2048, 16, 512, 128, 64, 128
FFN, EXPERTS, USED, SHARED, EXPERT_FFN, VOCABULARY = 10944, 64, 6, 2, 1408, 4096
STEP = 512  # tokens per step
NAMES = ("absorbed", "absorbed, q8_0", "expanded", "expanded again")


# -- the model ---------------------------------------------------------------------------------------------------------


def tensors() -> Iterator[NewTensor]:
    """Yield tensors as in a Q4_K_M GGUF, without the Q6_K half of the value and down matrices."""
    source = Rows(0)

    def matrix(name: str, *shape: int) -> NewTensor:
        format_name = "Q4_K" if shape[-1] % 256 == 0 else "Q5_0"
        return NewTensor(
            name + ".weight", format_name, shape, lambda: source.of(int(np.prod(shape[:-1])), shape[-1], format_name)
        )

    def ones(name: str, width: int) -> NewTensor:
        return NewTensor(name + ".weight", "F32", (width,), np.ones(width, np.float32).view(np.uint8))

    def feed_forward(blk: str, suffix: str, ffn: int, *stack: int) -> Iterator[NewTensor]:
        yield matrix(f"{blk}ffn_gate{suffix}", *stack, ffn, WIDTH)
        yield matrix(f"{blk}ffn_up{suffix}", *stack, ffn, WIDTH)
        yield matrix(f"{blk}ffn_down{suffix}", *stack, WIDTH, ffn)

    yield matrix("token_embd", VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        yield ones(blk + "attn_norm", WIDTH)
        yield matrix(blk + "attn_q", HEADS * (PLAIN + ROTATED), WIDTH)
        yield matrix(blk + "attn_kv_a_mqa", RANK + ROTATED, WIDTH)
        yield ones(blk + "attn_kv_a_norm", RANK)
        yield matrix(blk + "attn_k_b", HEADS, RANK, PLAIN)
        yield matrix(blk + "attn_v_b", HEADS, VALUE, RANK)
        yield matrix(blk + "attn_output", WIDTH, HEADS * VALUE)
        yield ones(blk + "ffn_norm", WIDTH)
        if layer < DENSE:
            yield from feed_forward(blk, "", FFN)
            continue
        yield NewTensor(blk + "ffn_gate_inp.weight", "F32", (EXPERTS, WIDTH), lambda: source.of(EXPERTS, WIDTH, "F32"))
        yield from feed_forward(blk, "_exps", EXPERT_FFN, EXPERTS)
        yield from feed_forward(blk, "_shexp", SHARED * EXPERT_FFN)
    yield ones("output_norm", WIDTH)
    yield matrix("output", VOCABULARY, WIDTH)


def write_model(path: Path) -> None:
    keys = {
        "block_count": LAYERS,
        "context_length": 163840,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "leading_dense_block_count": DENSE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.kv_lora_rank": RANK,
        "attention.key_length": RANK + ROTATED,
        "attention.value_length": RANK,
        "attention.key_length_mla": PLAIN + ROTATED,
        "attention.value_length_mla": VALUE,
        "rope.dimension_count": ROTATED,
        "rope.freq_base": 10000.0,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_shared_count": SHARED,
        "expert_feed_forward_length": EXPERT_FFN,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
    }
    metadata: dict[str, Any] = {"general.architecture": "deepseek2", "general.name": "V2-Lite geometry"}
    metadata |= {f"deepseek2.{key}": value for key, value in keys.items()} | byte_vocabulary(VOCABULARY)
    write_gguf(path, metadata, tensors(), overwrite=True)


def part_of(label: str) -> str:
    """Return the part of the model that an entry of the profile belongs to."""
    if label.endswith(("attn_k_b.weight", "attn_v_b.weight")):
        return "absorbed matrices"
    if "attention" in label:
        return "attention"
    if "ffn" in label or "expert" in label:
        return "feed-forward"
    return "rest"


def prompt(model: localllm.Model, size: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of one prompt, and the share of the time in each part of the model."""
    executable = model.executable
    assert isinstance(executable, CpuExecutable)
    executable.entries[:, [Entry.ticks, Entry.waited]] = 0
    session = model.session()
    began = perf_counter()
    for start in range(0, size, STEP):
        session.evaluate([(7 * token) % 250 for token in range(start, min(start + STEP, size))], logits=False)
    seconds = perf_counter() - began
    session.close()
    profile = executable.profile()
    total = sum(ticks for _, ticks, _ in profile)
    parts: dict[str, float] = {}
    for label, ticks, _ in profile:
        parts[part_of(label)] = parts.get(part_of(label), 0.0) + ticks / total
    return seconds, parts


# -- one layer's attention alone ---------------------------------------------------------------------------------------


class Table:
    """A weight of random rows, for token embeddings and matrices."""

    def __init__(self, name: str, *shape: int, format_name: str = "F32") -> None:
        self.name, self.shape, self.format = name, shape, format_name
        self._shape, self._source = (int(np.prod(shape[:-1])), shape[-1]), Rows(1)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.concatenate(list(self._source.of(stop - start, self._shape[1], self.format)))


def absorbed(recorder: Recorder) -> Plan:
    r, scale = recorder, (PLAIN + ROTATED) ** -0.5
    plain, rotated, row, k = (
        r.embed(Table(name, STEP, width))
        for name, width in (("plain", HEADS * PLAIN), ("turned", HEADS * ROTATED), ("row", RANK), ("key", ROTATED))
    )
    keys = Table("k_b", HEADS, RANK, PLAIN, format_name="Q5_0")
    values = Table("v_b", HEADS, VALUE, RANK, format_name="Q4_K")
    q = r.concat(r.head_linear(plain, keys), rotated, HEADS)
    layer = r.append(r.concat(row, k), row, 1)
    return r.finish(r.head_linear(r.attention(q, layer, HEADS, scale), values))


def expanded(recorder: Recorder) -> Plan:
    r, scale = recorder, (PLAIN + ROTATED) ** -0.5
    q, k, row = (
        r.embed(Table(name, STEP, width))
        for name, width in (("queries", HEADS * (PLAIN + ROTATED)), ("turned", HEADS * ROTATED), ("row", RANK))
    )
    both = r.linear(row, Table("kv_b", HEADS * (PLAIN + VALUE), RANK, format_name="Q4_K"))
    keys = r.slice(both, 0, HEADS * PLAIN)
    layer = r.append(r.concat(keys, k, HEADS), r.slice(both, HEADS * PLAIN, both.width), HEADS)
    return r.finish(r.attention(q, layer, HEADS, scale))


def product(recorder: Recorder) -> Plan:
    """Return a plan that computes the heads' keys and values from latent rows."""
    row = recorder.embed(Table("row", STEP, RANK))
    return recorder.finish(recorder.linear(row, Table("kv_b", HEADS * (PLAIN + VALUE), RANK, format_name="Q4_K")))


def seconds_of(executable: CpuExecutable, size: int) -> float:
    """Return the seconds of a prompt in steps of STEP tokens. Each step requests the logits of its last token only."""
    table, total = np.arange(-(-size // BLOCK), dtype=np.int32)[None], 0.0
    for start in range(0, size, STEP):
        at = np.arange(start, min(start + STEP, size), dtype=np.int32)
        batch = Batch(at % STEP, at, at, np.zeros(len(at), np.int32), table, np.array([len(at) - 1], np.int32))
        began = perf_counter()
        executable.step(batch)
        total += perf_counter() - began
    return total


def alone(backend: CpuBackend, sizes: list[int], rounds: int) -> dict[int, dict[str, float]]:
    """Return the attention time of one layer in seconds for each form: the minimum over alternating rounds."""
    limits = Limits(STEP, STEP, -(-max(sizes) // BLOCK), -(-max(sizes) // BLOCK) * BLOCK)
    forms = {
        "absorbed": backend.bind(absorbed(Recorder()), limits),
        "absorbed, q8_0": backend.bind(absorbed(Recorder()), limits, CacheTypes("q8_0", "q8_0")),
        "expanded": backend.bind(expanded(Recorder()), limits),
        "product": backend.bind(product(Recorder()), limits),
    }
    found: dict[int, dict[str, float]] = {}
    for size in sizes:
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(rounds):
            for name, executable in forms.items():
                times[name].append(seconds_of(executable, size if name != "product" else STEP))
        least = {name: min(samples) for name, samples in times.items()}
        again = sum(range(0, size, STEP)) / STEP * least.pop("product")
        found[size] = least | {"expanded again": least["expanded"] + again}
    for executable in forms.values():
        executable.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="512,2048,8192")
    parser.add_argument("--model", type=Path, default=Path("/tmp/v2-lite-3l.gguf"))
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "latent.jsonl")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    if not arguments.model.exists():
        write_model(arguments.model)
    backend = CpuBackend(arguments.threads)
    forms = alone(backend, sizes, arguments.rounds)
    device = backend.describe()
    backend.close()
    print(f"| prompt | tokens/s | attention | absorbed matrices | {' | '.join(f'saved: {n}' for n in NAMES[1:])} |")
    print(f"|{'---:|' * (3 + len(NAMES))}")
    with localllm.load(arguments.model, threads=arguments.threads, ctx_size=max(sizes)) as model:
        prompt(model, STEP)
        for size in sizes:
            seconds, parts = min((prompt(model, size) for _ in range(arguments.rounds)), key=lambda pair: pair[0])
            each = {name: 1e3 * s for name, s in forms[size].items()}  # milliseconds per layer
            share = parts["attention"] + parts["absorbed matrices"]
            saved = {name: share * (1 - each[name] / each["absorbed"]) for name in NAMES[1:]}  # share saved
            row = {
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "prompt": size,
                "layers": LAYERS,
                "threads": arguments.threads,
                "device": device,
                "tokens_per_s": size / seconds,
                "seconds": seconds,
                "shares": parts,
                "layer_ms": each,
                "saved": saved,
                "machine": machine(),
            }
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shares = (parts["attention"], parts["absorbed matrices"], *saved.values())
            cells = (str(size), f"{size / seconds:.0f}", *(f"{each:.0%}" for each in shares))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
