"""Measures the quality of each cache type: perplexity, and KL divergence from the same model with an f16 cache.

    python benchmarks/cache_quality.py [MODEL.gguf=TEXT.txt ...] [--windows 4]
    python benchmarks/cache_quality.py --table

A window is as long as the model's trained context; its second half counts, as in llama.cpp's perplexity. A model
without a tokenizer (random weights, but every feature of its architecture) reads random tokens. One JSON line per model
and pair of types goes to benchmarks/results/cache_quality.jsonl; the rules of `localllm/cache/types.py` follow from
them.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from compare import RESULTS, ROOT

sys.path.insert(0, str(ROOT))

from localllm import load
from localllm.backends.cache import CACHE_TYPES
from localllm.evaluation import ModelSource, Scores, Windows, cut, evaluate, statistics

DATA = ROOT.parent / "shared" / "data"
PAIRS = [
    *((name, name) for name in CACHE_TYPES if name != "f16"),
    *(("q8_0", name) for name in ("f16", "q5_1", "q5_0", "q4_1", "q4_0")),
    *((name, "q8_0") for name in ("f16", "q5_0", "q4_0")),
    ("q4_0", "f16"),
    ("f16", "q4_0"),
]
DEFAULT = [
    f"{ROOT / 'models/demo/demo.gguf'}={DATA / 'text/dialog_sgd_dev.txt'}",
    f"{ROOT / 'models/demo/demo.gguf'}={DATA / 'text/tinystories_smallGPT.txt'}",
    f"{DATA / 'models/babyllama-969K-tok361-f32.gguf'}={DATA / 'text/tinystories_smallGPT.txt'}",
    f"{DATA / 'models/stories260K-f32.gguf'}={DATA / 'text/tinystories_smallGPT.txt'}",
    *(f"{DATA / 'archs' / name}.gguf=random" for name in ("gpt-oss-moe", "llama-dense", "gemma3-dense")),
]


def windows_of(path: str, text: str, count: int) -> Windows:
    with load(path, ctx_size=64) as model:
        assert model.config is not None
        context = min(model.config.context_length, 4096)
        if text == "random":
            tokens = np.random.default_rng(0).integers(0, model.config.vocabulary, (count, context))
            return Windows(tokens.astype(np.int32))
        return cut(
            model, Path(text).read_text(encoding="utf-8", errors="replace")[: 40 * count * context], context, count
        )


def measure(path: str, text: str, count: int) -> list[dict[str, object]]:
    windows = windows_of(path, text, count)
    rows = []
    for keys, values in PAIRS:
        with ExitStack() as opened:
            base, other = (
                ModelSource(
                    opened.enter_context(
                        load(path, ctx_size=windows.ctx_size, cache_type_k=k, cache_type_v=v, force=True)
                    ),
                    windows,
                )
                for k, v in (("f16", "f16"), (keys, values))
            )
            own, divergence = statistics(Scores.join(list(evaluate(windows, other, base))))
        assert divergence is not None
        row = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": Path(path).name,
            "text": Path(text).name,
            "context": windows.ctx_size,
            "predictions": own.tokens,
            "keys": keys,
            "values": values,
            "perplexity": own.perplexity.value,
            "perplexity_f16": divergence.base.perplexity.value,
            "kld": divergence.kld.value,
            "kld_99": divergence.kld_percentiles["99"],
            "same_top": divergence.same_top.value,
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


HEADER = """| model | text | context | keys | values | perplexity | against f16 | KL divergence | same top token |
|---|---|---:|---|---|---:|---:|---:|---:|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT, metavar="MODEL=TEXT")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="print the stored results")
    parser.add_argument("--out", type=Path, default=RESULTS / "cache_quality.jsonl")
    arguments = parser.parse_args()
    print(HEADER)
    if arguments.table:
        newest = {}
        for text in arguments.out.read_text().splitlines():
            row = json.loads(text)
            newest[row["model"], row["text"], row["keys"], row["values"]] = row
        print("\n".join(line(row) for row in newest.values()))
        return
    for pair in arguments.models:
        path, _, text = pair.partition("=")
        rows = measure(path, text, arguments.windows)
        with arguments.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
