"""Measure the quality of each cache type: perplexity, and KL divergence from the same model with an F16 KV cache.

    python benchmarks/cache_quality.py [MODEL.gguf=TEXT.txt ...] [--windows 4]
    python benchmarks/cache_quality.py --table
    python benchmarks/cache_quality.py --llama LLAMA_CPP

--llama takes a llama.cpp source tree with built libraries in build/bin. It compares the logits with a quantized cache
to the logits with a float32 cache, in both programs: the normalized mean squared error over --tokens. The weights are
converted to float32, because llama.cpp rounds activations to the type of smaller weights.

A window is as long as the model's training context. Only its second half counts, as in llama.cpp's perplexity. TEXT is
a file, "chats" (for the bundled model: chats that training left out), or "random" (random tokens, for models that have
no tokenizer and random weights, but every feature of their architecture). One JSON line per model and pair of types
goes to benchmarks/results/cache_quality.jsonl, and the newest line of each counts. The rules of
`localllm/engine/cache_types.py` are based on these results. `quality_table.py` measures the bundled model and writes
the table of docs/cache.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from bundled import DEMO, TEXTS, held_out, identity
from compare import RESULTS, ROOT
from llama_logits import build, cached

sys.path.insert(0, str(ROOT))

from localllm import load
from localllm.backends.cache import CACHE_TYPES
from localllm.base.units import size
from localllm.cli.terminal.formatting import markdown
from localllm.evaluation import ModelSource, Scores, Windows, cut_windows, evaluate, statistics

DATA = ROOT.parent / "shared" / "data"
OUT = RESULTS / "cache_quality.jsonl"
KEY = ("model", "text", "keys", "values", "type")  # what tells one measurement from another
PAIRS = [
    *((name, name) for name in CACHE_TYPES if name != "f16"),
    *(("q8_0", name) for name in ("f16", "q5_1", "q5_0", "q4_1", "q4_0")),
    *((name, "q8_0") for name in ("f16", "q5_0", "q4_0")),
    ("q4_0", "f16"),
    ("f16", "q4_0"),
]
DEFAULT = [
    f"{DEMO}=chats",
    f"{DATA / 'models/babyllama-969K-tok361-f32.gguf'}={DATA / 'text/tinystories_smallGPT.txt'}",
    f"{DATA / 'models/stories260K-f32.gguf'}={DATA / 'text/tinystories_smallGPT.txt'}",
    *(f"{DATA / 'archs' / name}.gguf=random" for name in ("gpt-oss-moe", "llama-dense", "gemma3-dense")),
]


ARCHS = (
    "llama-dense", "llama-moe", "qwen2-dense", "qwen3-dense", "gemma2-dense", "gemma3-dense", "phi3-dense",
    "gpt-oss-moe", "olmo2-dense", "glm4-dense", "stablelm-dense",
)  # fmt: skip
DIALOGUE = f"{DEMO}={TEXTS / 'dialog_sgd_dev.txt'}"
FLOAT = [DIALOGUE, *(f"{DATA / 'archs' / name}.gguf=random" for name in ARCHS)]  # head dimensions 64 and 128
QUANTIZED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def windows_of(path: str, text: str, count: int, texts: Path = TEXTS) -> Windows:
    with load(path, ctx_size=64) as model:
        assert model.config is not None
        context = min(model.config.context_length, 4096)
        if text == "random":
            tokens = np.random.default_rng(0).integers(0, model.config.vocabulary, (count, context))
            return Windows(tokens.astype(np.int32))
        if text == "chats":
            return held_out(model, texts, context, count)
        return cut_windows(
            model, Path(text).read_text(encoding="utf-8", errors="replace")[: 40 * count * context], context, count
        )


def measure(path: str, text: str, count: int, texts: Path = TEXTS) -> list[dict[str, object]]:
    windows = windows_of(path, text, count, texts)
    rows = []
    for keys, values in PAIRS:
        with ExitStack() as opened:
            model, other_model = (
                opened.enter_context(load(path, ctx_size=windows.ctx_size, cache_type_k=k, cache_type_v=v, force=True))
                for k, v in (("f16", "f16"), (keys, values))
            )
            bytes_per_token = [each.executable.memory.cache_per_token for each in (model, other_model)]
            base, other = ModelSource(model, windows), ModelSource(other_model, windows)
            own, divergence = statistics(Scores.join(list(evaluate(windows, other, base))))
        assert divergence is not None
        row = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": Path(path).name,
            "identity": identity(Path(path)),
            "text": Path(text).name,
            "context": windows.ctx_size,
            "bytes_per_token": bytes_per_token[1],
            "bytes_per_token_f16": bytes_per_token[0],
            "predictions": own.tokens,
            "keys": keys,
            "values": values,
            "perplexity": own.perplexity.value,
            "perplexity_f16": divergence.base.perplexity.value,
            "change": divergence.log_ratio.value,
            "change_error": divergence.log_ratio.error,
            "kld": divergence.kld.value,
            "kld_error": divergence.kld.error,
            "kld_99": divergence.kld_percentiles["99"],
            "same_top": divergence.same_top.value,
            "same_top_error": divergence.same_top.error,
        }
        print(line(row), flush=True)
        rows.append(row)
    return rows


def line(row: dict[str, object]) -> str:
    change = float(str(row["perplexity"])) / float(str(row["perplexity_f16"])) - 1
    return (
        f"| {row['model']} | {row['text']} | {row['context']} | {row['keys']} | {row['values']} | "
        f"{row['perplexity']:.4f} | {change:+.3%} | {row['kld']:.6f} | {row['same_top']:.2%} |"
    )


def error(logits: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the normalized mean squared error of each position's logits (T,)."""
    wide = exact.astype(np.float64)
    return ((logits - wide) ** 2).mean(-1) / ((wide - wide.mean(-1, keepdims=True)) ** 2).mean(-1)


def distances(path: str, text: str, program: Path, work: Path, count: int, types: list[str]) -> list[dict[str, object]]:
    """Measure the error of logits with quantized caches against a float32 cache, in localllm and in llama.cpp."""
    model = work / Path(path).name
    words = ["quantize", path, str(model), "F32", "--allow-requantize", "--force"]
    subprocess.run([sys.executable, "-m", "localllm", *words], check=True, capture_output=True, cwd=ROOT)
    tokens = windows_of(str(model), text, count // 256).tokens
    tokens = tokens[: count // tokens.shape[1]]

    def own(name: str) -> np.ndarray:
        with load(model, ctx_size=tokens.shape[1], cache_type_k=name, cache_type_v=name, force=True) as opened:
            return np.stack([opened.logits(window.tolist()) for window in tokens])

    rows = []
    exact, theirs = own("f32"), cached(program, model, tokens, "f32", work)
    for name in types:
        ours = error(own(name), exact)
        peers = error(cached(program, model, tokens, name, work), theirs)
        row = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": model.name,
            "text": Path(text).name,
            "context": tokens.shape[1],
            "tokens": tokens.size,
            "type": name,
            "nmse_mean": float(ours.mean()),
            "nmse_median": float(np.median(ours)),
            "nmse_mean_llama_cpp": float(peers.mean()),
            "nmse_median_llama_cpp": float(np.median(peers)),
        }
        print(distance_line(row), flush=True)
        rows.append(row)
    return rows


def distance_line(row: dict[str, Any]) -> str:
    mean, median = (row[key] / row[key + "_llama_cpp"] for key in ("nmse_mean", "nmse_median"))
    return (
        f"| {row['model']} | {row['tokens']} | {row['type']} | {row['nmse_mean']:.2e} | "
        f"{row['nmse_mean_llama_cpp']:.2e} | {mean:.3f} | {median:.3f} |"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the table for docs/cache.md: ratios of the mean errors over all models, by cache type."""
    lines = ["| type   | localllm : llama.cpp | range        |", "| ------ | -------------------: | ------------ |"]
    for name in QUANTIZED:
        newest = {row["model"]: row for row in rows if row.get("type") == name}
        ratios = np.array([row["nmse_mean"] / row["nmse_mean_llama_cpp"] for row in newest.values()])
        mean = float(np.exp(np.log(ratios).mean()))
        lines.append(f"| {f'`{name}`':6} | {mean:20.2f} | {ratios.min():.2f} to {ratios.max():.2f} |")
    return "\n".join(lines)


def stored(path: Path = OUT) -> list[dict[str, Any]]:
    """Return the newest row of every measurement."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    return list({tuple(row.get(key) for key in KEY): row for row in rows}.values())


def costs(rows: list[dict[str, Any]]) -> str:
    """Return the table for docs/cache.md: what each type for keys and values costs the bundled model."""
    measured = {row["keys"]: row for row in rows if row["text"] == "chats" and row.get("keys") == row.get("values")}
    lines = []
    for name, row in sorted(measured.items(), key=lambda item: -item[1]["bytes_per_token"]):
        lines.append(
            (
                f"`{name}`",
                size(row["bytes_per_token"]),
                f"{row['bytes_per_token'] / row['bytes_per_token_f16']:.2f}",
                f"{100 * row['change']:+.2f} ± {100 * row['change_error']:.2f} %",
                f"{row['kld']:.5f} ± {row['kld_error']:.5f}",
                f"{100 * row['same_top']:.1f} %",
            )
        )
    header = ("type", "a token", "of f16", "perplexity", "KL divergence", "same top token")
    return markdown(header, lines, right=header[1:])


DISTANCES = """| model | tokens | cache | NMSE | llama.cpp | ratio of means | ratio of medians |
|---|---:|---|---:|---:|---:|---:|"""
HEADER = """| model | text | context | keys | values | perplexity | against f16 | KL divergence | same top token |
|---|---|---:|---|---|---:|---:|---:|---:|"""


def compare_with(arguments: argparse.Namespace) -> None:
    print(DISTANCES)
    with TemporaryDirectory() as folder:
        work = Path(folder)
        build(arguments.llama, work / "logits")
        for pair in arguments.models if arguments.models is not DEFAULT else FLOAT:
            path, _, text = pair.partition("=")
            rows = distances(path, text, work / "logits", work, arguments.tokens, arguments.types)
            with arguments.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT, metavar="MODEL=TEXT")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="print the stored results")
    parser.add_argument("--llama", type=Path, help="a llama.cpp tree: measure the distance from float32 caches")
    parser.add_argument("--tokens", type=int, default=2048, help="with --llama; a multiple of the context")
    parser.add_argument("--types", nargs="+", default=list(QUANTIZED), help="with --llama")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.table:
        rows = stored(arguments.out)
        print("\n".join([HEADER, *(line(row) for row in rows if "keys" in row)]), end="\n\n")
        print("\n".join([DISTANCES, *(distance_line(row) for row in rows if "type" in row)]), end="\n\n")
        print(summary(rows))
        return
    if arguments.llama is not None:
        compare_with(arguments)
        return
    print(HEADER)
    for pair in arguments.models:
        path, _, text = pair.partition("=")
        rows = measure(path, text, arguments.windows)
        with arguments.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
