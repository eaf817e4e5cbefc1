"""Measure the loss by quantization: size, perplexity, KL divergence and same top token, ours next to llama-quantize.

    python benchmarks/quality_table.py --llama-quantize PATH [--texts ../shared/data/text] [--windows 40] [--only REGEX]

The bundled model, with its matrices as F32, is quantized, and is the base of the divergence. Calibration (imatrix, awq,
gptq, --fit) uses the first parts of stories and dialogues. Measurements use wikitext-2 and the end of another file of
stories, which calibration does not use. Both programs get the same importance matrix. The gain of a calibration is the
divergence without it minus the divergence with it, token by token. The error of the gain is the error of this
difference. Every row is stored in results/quality.jsonl when it is complete; `--table` prints the stored rows as
Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from compare import RESULTS, ROOT

sys.path.insert(0, str(ROOT))

from localllm import load
from localllm.cli.terminal.formatting import markdown
from localllm.evaluation import LogitsFile, ModelSource, Scores, Windows, cut_windows, evaluate, save_base, statistics
from localllm.evaluation.likelihood import mean_of

CONTEXT = 512
PLAIN = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS")
PLAIN += ("Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K")
CALIBRATED = ("Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_M", "Q3_K_S", "IQ3_S", "Q2_K")
NEED_IMATRIX = ("IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
SIZES = ("7.0MB", "6.0MB", "5.0MB")  # targets for --fit, each near the size of a type
CALIBRATION_BYTES = 25_000  # bytes of each calibration text


class Way(NamedTuple):
    """One way to make a GGUF, which is a row of the table.

    `peer` holds llama-quantize's arguments, if it can do the same.
    """

    name: str
    ours: list[str]
    peer: list[str] | None


def ways(imatrix: str, text: str) -> Iterator[Way]:
    for kind in PLAIN:
        yield Way(kind, [kind], [kind])
    for kind in (*CALIBRATED, *NEED_IMATRIX):
        yield Way(f"{kind} imatrix", [kind, "--imatrix", imatrix], ["--imatrix", imatrix, kind])
        for method in ("awq", "gptq"):
            yield Way(f"{kind} {method}", [kind, "--method", method, "-f", text], None)
    for size in SIZES:
        yield Way(f"--fit {size}", ["--fit", size, "-f", text], None)


class Yardstick:
    """The windows of one text, with the base model's logits for them."""

    def __init__(self, name: str, text: str, base: Path, folder: Path, windows: int) -> None:
        self.name = name
        with load(base, ctx_size=CONTEXT) as model:
            self.windows: Windows = cut_windows(model, text, CONTEXT, windows)
            source = ModelSource(model, self.windows)
            with save_base(folder / name, self.windows, source.vocabulary) as keep:
                scores = Scores.join(list(evaluate(self.windows, source, None, None, keep)))
        self.base = statistics(scores)[0].perplexity
        self._file = LogitsFile(folder / name)

    def measure(self, path: Path) -> tuple[dict[str, float], np.ndarray]:
        """Return the means with their errors, and the KL divergence of every token."""
        with load(path, ctx_size=CONTEXT) as model:
            scores = Scores.join(list(evaluate(self.windows, ModelSource(model, self.windows), self._file)))
        result, divergence = statistics(scores)
        assert divergence is not None
        numbers = {"perplexity": result.perplexity, "kld": divergence.kld, "same_top": divergence.same_top}
        found = {name: mean.value for name, mean in numbers.items()}
        return found | {f"{name}_error": mean.error for name, mean in numbers.items()}, scores.kld


def calibration_text(texts: Path) -> str:
    parts = [
        (texts / name).read_text(encoding="utf-8")[:CALIBRATION_BYTES]
        for name in ("tinystories_smallGPT.txt", "dialog_sgd_dev.txt")
    ]
    return "\n".join(parts)


def test_texts(texts: Path) -> dict[str, str]:
    return {
        "wikitext-2": (texts / "wiki.test.raw").read_text(encoding="utf-8"),
        "stories": (texts / "tinystories_decoding-gpt.txt").read_text(encoding="utf-8")[-300_000:],
    }


def call(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout[-500:]}{done.stderr[-500:]}")


def rows(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    ours = [sys.executable, "-m", "localllm"]
    base, calibration, imatrix = folder / "base.gguf", folder / "calibration.txt", folder / "imatrix.gguf"
    call(*ours, "quantize", "demo", base, "F32", "--allow-requantize")
    calibration.write_text(calibration_text(arguments.texts), encoding="utf-8")
    call(*ours, "imatrix", base, "-f", calibration, "-o", imatrix)
    texts = test_texts(arguments.texts)
    sticks = [Yardstick(name, text, base, folder, arguments.windows) for name, text in texts.items()]
    plain: dict[str, list[np.ndarray]] = {}
    for way in ways(str(imatrix), str(calibration)):
        if not re.search(arguments.only, way.name):
            continue
        files = {"ours": folder / "ours.gguf"}
        call(*ours, "quantize", base, files["ours"], *way.ours, "--force")
        if way.peer is not None:
            files["llama-quantize"] = folder / "peer.gguf"
            call(arguments.llama_quantize, *way.peer[:-1], base, files["llama-quantize"], way.peer[-1])
        found: dict[str, dict[str, Any]] = {}
        gains: dict[str, dict[str, float]] = {}
        for program, path in files.items():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            twin = next((x for x in found.values() if x["sha256"] == digest), None)
            if twin is None:
                measured = [stick.measure(path) for stick in sticks]
                numbers = {stick.name: values for stick, (values, _) in zip(sticks, measured, strict=True)}
                twin = {"sha256": digest, "bytes": path.stat().st_size, "texts": numbers}
                if program == "ours":
                    kind, tokens = way.name.split()[0], [kld for _, kld in measured]
                    if way.name == kind:
                        plain[kind] = tokens
                    elif kind in plain:
                        gains = against(plain[kind], tokens, sticks)
            found[program] = twin
        yield {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "way": way.name,
            "windows": {stick.name: len(stick.windows.tokens) for stick in sticks},
            "base": {stick.name: stick.base.value for stick in sticks},
            "same_file": len(found) == 2 and len({x["sha256"] for x in found.values()}) == 1,
            "files": found,
            "less_than_plain": gains,
        }


def against(plain: list[np.ndarray], tokens: list[np.ndarray], sticks: list[Yardstick]) -> dict[str, dict[str, float]]:
    """Return, by text, the decrease in divergence relative to the plain GGUF, and the error of the decrease."""
    means = [mean_of(before - after) for before, after in zip(plain, tokens, strict=True)]
    return {stick.name: {"kld": m.value, "kld_error": m.error} for stick, m in zip(sticks, means, strict=True)}


def table(stored: list[dict[str, Any]]) -> str:
    latest = {row["way"]: row for row in stored}
    lines = []
    for way, row in latest.items():
        for program, file in row["files"].items():
            if program != "ours" and row["same_file"]:
                continue
            numbers = []
            for name, text in file["texts"].items():
                gain = row.get("less_than_plain", {}).get(name) if program == "ours" else None
                numbers += [
                    f"{text['perplexity']:.2f} ± {text['perplexity_error']:.2f}",
                    f"{text['kld']:.4f} ± {text['kld_error']:.4f}",
                    f"{gain['kld']:.4f} ± {gain['kld_error']:.4f}" if gain else "",
                    f"{100 * text['same_top']:.1f} %",
                ]
            who = "both, same bytes" if row["same_file"] else program
            lines.append((way, who, f"{file['bytes'] / 1e6:.2f} MB", *numbers))
    header = [
        f"{text} {what}" for text in stored[0]["base"] for what in ("perplexity", "KLD", "less than plain", "same top")
    ]
    return markdown(("type", "file of", "size", *header), lines, right=("size", *header))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--texts", type=Path, default=ROOT.parent / "shared" / "data" / "text")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--only", default="", help="only rows whose name matches this regular expression")
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.jsonl")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(arguments, Path(folder)):
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["way"], row["same_file"], row["files"]["ours"]["texts"], flush=True)
    print(table([json.loads(line) for line in arguments.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
