"""Golden tests: hashes of the logits and tokens of small models, stored in `golden.json` and checked by test_golden.py.

    python -m tests.golden             recreate golden.json, and print the entries that change
    python -m tests.golden NAME...     only these models

A token's logits depend only on the model and the preceding tokens, bit for bit. So each model has one entry,
and every condition must reproduce it: alone, in chunks, in a batch, after drafts, on one thread, on two
and on changing numbers of threads, on AVX2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import localllm
from localllm import quant
from localllm.backends.cpu.adaptive import AdaptiveThreads
from localllm.backends.cpu.backend import CpuExecutable
from localllm.engine import SequenceRows
from localllm.generation.speculation.rule import DraftToken
from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.options import DiffusionOptions, SamplingOptions
from tests.backends.support import stored
from tests.localllm.generation.speculation.support import Told, drafting_by
from tests.models.kit import EMBEDDERS, KIT

PATH = Path(__file__).with_suffix(".json")
COUNT, LONG = 80, 300  # tokens with logits: more than a KV cache block holds, and more than a chunk of attention
VOCABULARY, MASK = 127, 127  # prompt tokens are below VOCABULARY; MASK is the mask token of diffusion models
WRITTEN = 20  # tokens to generate with greedy decoding
ALONE = "alone"  # the condition whose hashes are stored: one sequence, one thread
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
Found = dict[str, dict[str, str]]  # condition -> "logits", "tokens" or "embeddings" -> hash


@dataclass(frozen=True)
class Case:
    """A test model, optionally with another weight format or KV cache type."""

    kit: str
    format: str = ""
    cache: str = "f16"
    count: int = COUNT

    @property
    def name(self) -> str:
        cache = "" if self.cache == "f16" else f"cache {self.cache}"
        return " ".join(filter(None, (self.kit, self.format, cache, "" if self.count == COUNT else "long")))

    @property
    def tokens(self) -> list[int]:
        return tokens(self.kit, self.count)


ATTENDING = [
    "llama-gqa", "llama4-moe", "gemma2-dense", "gemma3-12", "gemma3n-e2b", "gemma4-26b-a4b", "gpt-oss-moe",
    "qwen3moe-moe", "qwen2moe-moe", "phi3-dense", "gpt2-dense", "bloom-dense", "mpt-dense", "falcon-dense",
    "stablelm-dense", "command-r-dense", "cohere2-dense", "chatglm-dense", "olmo2-dense", "granitemoe-moe", "grok-moe",
    "step35", "mimo2-mtp", "nanbeige-loops", "apertus",
]  # fmt: skip
LATENT = ["deepseek2-moe", "minicpm3-dense", "plm", "mistral4-moe"]
SPARSE = [
    "deepseek32-8of40", "hy_v4-8of40", "glm5-next-8of40", "qwen4exp-8of40", "deepseek4-8of50", "minimax-m3-3of10",
]  # fmt: skip
RECURRENT = [
    "mamba-dense", "mamba2-dense", "jamba-dense", "falcon-h1-dense", "granitehybrid-dense", "nemotron_h-dense",
    "plamo2-dense", "lfm2-dense", "qwen35-dense", "qwen3next-moe", "kimi-linear-moe", "minimax-01-moe", "rwkv6",
    "rwkv7", "kimi-k3-moe",
]  # fmt: skip
ENCODED = ["t5-gated", "t5-relu"]  # encoder-decoder models: ids before the start token go to the encoder
DIFFUSION = ["dream-dense", "rnd1-moe"]
EMBEDDED = ["bert-mean", "modern-bert", "nomic-bert-moe", "qwen3-embedding", "t5encoder", "jina-bert-v2"]
FORMATS = [
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
]  # fmt: skip
CACHES = ["f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "fp8"]
ON_AVX2 = {
    "llama-gqa", "gemma3-12", "deepseek2-moe", "qwen35-dense", "qwen3-dense Q4_0", "qwen3-dense Q8_0",
    "qwen3-dense Q4_K", "qwen3-dense IQ4_XS", "llama-gqa cache q8_0", "llama-gqa long",
}  # fmt: skip


def _cases() -> Iterator[Case]:
    for name in (*ATTENDING, *LATENT, *SPARSE, *RECURRENT, *ENCODED, *DIFFUSION, *EMBEDDED):
        yield Case(name)
    for format in FORMATS:
        yield Case("qwen3-dense", format)
    for kit, format in (
        ("qwen3moe-moe", "Q4_K"), ("gpt-oss-moe", "MXFP4"), ("deepseek2-moe", "Q8_0"), ("qwen35-dense", "Q4_0"),
    ):  # fmt: skip
        yield Case(kit, format)
    for cache in CACHES:
        yield Case("llama-gqa", cache=cache)
    for kit, cache in (("gemma3-12", "q8_0"), ("gpt-oss-moe", "q4_0"), ("deepseek2-moe", "q8_0")):
        yield Case(kit, cache=cache)
    for kit in ("llama-gqa", "gemma3-12", "gpt-oss-moe", "deepseek2-moe", "qwen35-dense"):
        yield Case(kit, count=LONG)


CASES = {case.name: case for case in _cases()}


# -- models ----------------------------------------------------------------------------------------------------------


def write(case: Case, folder: Path) -> Path:
    """Write the model to a GGUF. Weights in another format are random blocks, so the bits depend on no quantizer."""
    path = (KIT | EMBEDDERS)[case.kit].write(folder / "model.gguf")
    if not case.format and case.kit not in DIFFUSION:
        return path
    with open_gguf(path) as file:
        metadata = dict(file.stored) | ({"tokenizer.ggml.mask_token_id": MASK} if case.kit in DIFFUSION else {})
        tensors, block = [], quant.FORMATS[case.format or "F32"].block_values
        for name, tensor in file.tensors.items():
            shape, rows = tuple(tensor.shape), math.prod(tensor.shape[:-1])
            if case.format and len(shape) > 1 and shape[-1] % block == 0 and min(shape[-2:]) > 16:
                weight = stored(name, case.format, (rows, shape[-1]), 1 / 64, 1)
                tensors.append(NewTensor(name, case.format, shape, weight.rows.tobytes()))
            else:
                tensors.append(NewTensor(name, tensor.format, shape, tensor.read(0, rows).tobytes()))
    assert not case.format or sum(tensor.format == case.format for tensor in tensors) > 10
    other = folder / "changed.gguf"
    write_gguf(other, metadata, tensors)
    path.unlink()
    return other


def tokens(name: str, count: int) -> list[int]:
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
    return [int(token) for token in (bits >> np.uint64(20)) % np.uint64(VOCABULARY)]


def digest(numbers: np.ndarray | Sequence[int]) -> str:
    found = np.asarray(numbers, np.float32 if isinstance(numbers, np.ndarray) else np.int32)
    assert found.size
    assert np.isfinite(found[found != -np.inf]).all()
    return hashlib.sha256(found.tobytes()).hexdigest()[:20]


# -- the program's interfaces: adapt this part when they change --------------------------------------------------------


def opened(case: Case, path: Path, threads: int, **more: object) -> localllm.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return localllm.load(
            path,
            backend="cpu",
            ctx_size=case.count + 48,
            threads=threads,
            cache_type_k=case.cache,
            cache_type_v=case.cache,
            any_cache=True,
            embeddings=case.kit in EMBEDDED,
            **more,  # type: ignore[arg-type]
        )


class Turns(AdaptiveThreads):
    """Every other step runs on one thread, as on a machine that is busy at times."""

    def observe(self, kind: Hashable, seconds: float, late: float) -> None:
        self.threads = self.most + 1 - self.threads


def take_turns(model: localllm.Model) -> None:
    assert isinstance(model.executable, CpuExecutable)
    model.executable.thread_counts = tuple(Turns(model.executable.pool.threads) for _ in range(2))


class Steps:
    """Sequences of one model that a step extends together."""

    def __init__(self, model: localllm.Model, sequences: int = 1) -> None:
        self.engine = model.engine
        self.sequences = [self.engine.add() for _ in range(sequences)]

    def step(self, parts: Sequence[tuple[int, Sequence[int]]], skip: int = 0) -> np.ndarray:
        """Append tokens to the numbered sequences. Return the logits of sequence 0, without the first `skip` of
        them.
        """
        rows = [
            SequenceRows(self.sequences[number], list(more), "last" if number else tuple(range(skip, len(more))))
            for number, more in parts
        ]
        own = next(at for at, (number, _) in enumerate(parts) if not number)
        return self.engine.step(rows)[own].logits.copy()

    def keep(self, length: int) -> int:
        """Rewind sequence 0 and return its length, or 0 if it must be evaluated from the start."""
        return self.engine.truncate(self.sequences[0], length)

    def close(self) -> None:
        for sequence in self.sequences:
            self.engine.release(sequence)


def embeddings(model: localllm.Model, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the token embeddings of each text."""
    return list(model.embedder.vectors(texts, "none"))


def answer(model: localllm.Model, prompt: Sequence[int]) -> list[int]:
    return model.generate(prompt, temperature=0, max_tokens=WRITTEN, ignore_eos=True).tokens


def drafted_answer(model: localllm.Model, prompt: Sequence[int], told: Sequence[int]) -> list[int]:
    """Generate with speculative decoding. Drafts are the tokens `told`, with every fifth one replaced by a
    wrong token.
    """
    text = [*prompt, *told]

    def guess(seen: Sequence[int], sampler: object) -> DraftToken:
        right = text[len(seen)] if len(seen) < len(text) else 0
        return DraftToken((right + 1) % VOCABULARY if len(seen) % 5 == 0 else right, 0)

    with drafting_by(model, Told(guess, longest=7)):
        reply = model.generate(prompt, temperature=0, max_tokens=WRITTEN, ignore_eos=True)
        assert reply.usage.decode_passes < WRITTEN // 2, "drafts were not used"
        return reply.tokens


def filled(model: localllm.Model, prompt: Sequence[int]) -> list[int]:
    *_, last = model.diffuse(
        prompt, DiffusionOptions(diffusion_steps=4), SamplingOptions(temperature=0), max_tokens=WRITTEN
    )
    return list(last.answer)


# -- conditions ------------------------------------------------------------------------------------------------------


def measure(case: Case, conditions: bool = True) -> Found:
    """Return a model's hashes under every condition, or only those that are stored."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(case, Path(folder))
        served = 0 if case.kit in DIFFUSION or case.kit in EMBEDDED else 3
        with opened(case, path, 1, sequences=served) as model:
            found = _with_one_thread(case, model, conditions)
        if conditions:
            with opened(case, path, 2) as model:
                found |= _with_two(case, model)
    return found


def _with_one_thread(case: Case, model: localllm.Model, conditions: bool) -> Found:
    ids = case.tokens
    if case.kit in DIFFUSION:
        return {ALONE: {"tokens": digest(filled(model, ids))}}
    if case.kit in EMBEDDED:
        found = {ALONE: {"embeddings": digest(embeddings(model, [ids])[0])}}
        if conditions:
            texts = [tokens("before", 13), ids, tokens("behind", 40)]
            found["batch"] = {"embeddings": digest(embeddings(model, texts)[1])}
        return found
    first, ids = _begin(case, model, ids)
    written = answer(model, ids[:40])
    found = {ALONE: {"logits": _alone(model, ids, first), "tokens": digest(written)}}
    if conditions:
        found["batch"] = {"logits": _in_a_batch(model, ids, first)}
        found["after drafts"] = {"logits": _after_drafts(model, ids, first)}
        found["drafted"] = {"tokens": digest(drafted_answer(model, ids[:40], written))}
    return found


def _with_two(case: Case, model: localllm.Model) -> Found:
    ids = case.tokens
    if case.kit in DIFFUSION:
        return {"2 threads": {"tokens": digest(filled(model, ids))}}
    if case.kit in EMBEDDED:
        return {"2 threads": {"embeddings": digest(embeddings(model, [ids])[0])}}
    first, ids = _begin(case, model, ids)
    found = {"2 threads": {"logits": _alone(model, ids, first)}}
    take_turns(model)
    return found | {"1 and 2 threads in turn, chunks of 7": {"logits": _in_chunks(model, ids, first)}}


def _begin(case: Case, model: localllm.Model, ids: list[int]) -> tuple[int, list[int]]:
    """Return all tokens, and how many of them the encoder reads in one step, without logits."""
    if case.kit not in ENCODED:
        return 0, ids
    start = model.engine.start
    assert start is not None
    text = [token for token in ids[:30] if token != start]
    return len(text), [*text, start, *ids[30:]]


def _alone(model: localllm.Model, ids: list[int], first: int) -> str:
    if not first:
        return digest(model.logits(ids))
    steps = Steps(model)
    found = digest(steps.step([(0, ids)], first))
    steps.close()
    return found


def _in_chunks(model: localllm.Model, ids: list[int], first: int) -> str:
    steps, found, at = Steps(model), [], 0
    while at < len(ids):
        size = 7 if at else first + 7
        found.append(steps.step([(0, ids[at : at + size])], 0 if at else first))
        at += size
    steps.close()
    return digest(np.concatenate(found))


def _in_a_batch(model: localllm.Model, ids: list[int], first: int) -> str:
    """Evaluate in chunks of different lengths, with two other sequences in every step."""
    steps, found, at, number = Steps(model, 3), [], 0, 0
    begun = [[*ids[:first], ids[first]] if first else [] for _ in range(2)]
    before, behind = tokens("before", LONG), tokens("behind", LONG)
    while at < len(ids):
        size = (1, 6, 23, 2, 1, 30, 1)[number % 7] + (0 if at else first)
        more = [
            (1, begun[0] + before[5 * number : 5 * number + 5]),
            (0, ids[at : at + size]),
            (2, begun[1] + behind[3 * number : 3 * number + 1 + number % 3]),
        ]
        found.append(steps.step(more, 0 if at else first))
        begun, at, number = [[], []], at + size, number + 1
    steps.close()
    return digest(np.concatenate(found))


def _after_drafts(model: localllm.Model, ids: list[int], first: int) -> str:
    """Evaluate as speculative decoding does: accepted and rejected tokens in one step, then rewind the rejected
    ones.
    """
    steps, found, at = Steps(model), [], first + 11
    found.append(steps.step([(0, ids[:at])], first))
    while at < len(ids):
        right, wrong = ids[at : at + 1 + at % 5], [(ids[at] + 1 + n) % VOCABULARY for n in range(at % 4)]
        found.append(steps.step([(0, right + wrong)])[: len(right)])
        at += len(right)
        if wrong and steps.keep(at) < at:
            steps.step([(0, ids[:at])], at - 1)
    steps.close()
    return digest(np.concatenate(found))


# -- other instruction sets, and the file ----------------------------------------------------------------------------


def stored_alone(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Compute the entries to store for the named models in this process."""
    return {name: measure(CASES[name], conditions=False)[ALONE] for name in names}


def on_avx2(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Compute the entries to store for the named models in a process whose kernels are compiled for AVX2."""
    command = [sys.executable, "-m", "tests.golden", "--print", *names]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=os.environ | AVX2, cwd=root, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def kept() -> dict[str, dict[str, str]]:
    return dict(json.loads(PATH.read_text())) if PATH.exists() else {}


def keep(entries: dict[str, dict[str, str]]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in CASES if name in entries)
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[[], *CASES])
    parser.add_argument("--print", action="store_true", help="print the entries instead of writing the file")
    given = parser.parse_args()
    if given.print:
        print(json.dumps(stored_alone(given.name or list(CASES))))
        return
    before = kept()
    after = stored_alone(given.name or list(CASES))
    for name, entry in after.items():
        if name in before and before[name] != entry:
            print(f"{name}: {before[name]} -> {entry}")
        elif name not in before:
            print(f"{name}: new")
    keep({name: entry for name, entry in (before | after).items() if name in CASES})


if __name__ == "__main__":
    main()
