"""Measure what quantization costs the bundled model, and write the tables of docs/quantizing.md and docs/cache.md.

    python benchmarks/quality_table.py [--llama-quantize PATH] [--texts ../shared/data/text] [--only REGEX]
    python benchmarks/quality_table.py --table

The first command measures every row (10 minutes on two idle cores). The second one only writes the tables. The base of
the divergence is the bundled model as `quality_base.py` rewrites it. Calibration (imatrix, awq, gptq, --fit) uses chats
of the training text. Measurements use chats that training left out, and wikitext-2, which is unlike the training text.

With --llama-quantize, the same base is quantized by llama.cpp too, with the same importance matrix. If its file has
other bytes, it is measured as well. The gain of a calibration is the divergence without it minus the divergence with
it, token by token. The error of the gain is the error of this difference.

Every row is appended to results/quality.jsonl when it is complete, and the newest row of a name counts. Cache types are
measured by cache_quality.py, on the same chats and with the file that ships.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
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

from bundled import DEMO, TEXTS, calibration, held_out, identity
from cache_quality import OUT as CACHES
from cache_quality import costs, measure
from cache_quality import stored as stored_caches
from quality_base import write_base

from localllm import Model, load
from localllm.cli.documents import update
from localllm.cli.terminal.formatting import markdown
from localllm.evaluation import LogitsFile, ModelSource, Scores, Windows, cut_windows, evaluate, save_base, statistics
from localllm.evaluation.likelihood import mean_of
from localllm.gguf import open_gguf

CONTEXT = 512
CACHE_WINDOWS = 20
OUT = RESULTS / "quality.jsonl"
PLAIN = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS")
PLAIN += ("Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K")
CALIBRATED = ("Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_M", "Q3_K_S", "IQ3_S", "Q2_K")
NEED_IMATRIX = ("IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
METHODS_TRIED = ("Q4_K_M", "Q4_0", "Q3_K_S", "Q2_K", "IQ4_XS", "IQ3_S", "IQ2_XS")  # with AWQ and GPTQ
METHODS = {"imatrix": "imatrix", "awq": "AWQ", "gptq": "GPTQ"}
SIZES = ("7.0MB", "6.0MB", "5.0MB")  # targets for --fit
CHATS, WIKITEXT = "chats", "wikitext-2"


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
    for kind in METHODS_TRIED:
        for method in ("awq", "gptq"):
            yield Way(f"{kind} {method}", [kind, "--method", method, "-f", text], None)
    for size in SIZES:
        yield Way(f"--fit {size}", ["--fit", size, "-f", text], None)


class Yardstick:
    """The windows of one text, with the base model's logits for them."""

    def __init__(self, name: str, base: Path, folder: Path, arguments: argparse.Namespace) -> None:
        self.name = name
        with load(base, ctx_size=CONTEXT) as model:
            self.windows: Windows = windows_of(name, model, arguments.texts, arguments.windows)
            source = ModelSource(model, self.windows)
            with save_base(folder / name, self.windows, source.vocabulary) as keep:
                scores = Scores.join(list(evaluate(self.windows, source, None, None, keep)))
        self.base = statistics(scores)[0].perplexity
        self._nll = scores.nll  # the file of logits limits the least likely tokens to e^-16
        self._file = LogitsFile(folder / name)

    def measure(self, path: Path) -> tuple[dict[str, float], np.ndarray]:
        """Return the means with their errors, and the KL divergence of every token."""
        with load(path, ctx_size=CONTEXT) as model:
            scores = Scores.join(list(evaluate(self.windows, ModelSource(model, self.windows), self._file)))
        result, divergence = statistics(scores)
        assert divergence is not None
        numbers = {
            "perplexity": result.perplexity,
            "change": mean_of(scores.nll - self._nll),
            "kld": divergence.kld,
            "same_top": divergence.same_top,
        }
        found = {name: mean.value for name, mean in numbers.items()}
        return found | {f"{name}_error": mean.error for name, mean in numbers.items()}, scores.kld


def windows_of(name: str, model: Model, texts: Path, count: int) -> Windows:
    if name == CHATS:
        return held_out(model, texts, CONTEXT, count)
    return cut_windows(model, (texts / "wiki.test.raw").read_text(encoding="utf-8"), CONTEXT, count)


def call(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout[-500:]}{done.stderr[-500:]}")


def rows(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    ours = [sys.executable, "-m", "localllm"]
    base, text, imatrix = folder / "base.gguf", folder / "calibration.txt", folder / "imatrix.gguf"
    model = identity()
    write_base(DEMO, base)
    text.write_text(calibration(arguments.texts), encoding="utf-8")
    call(*ours, "imatrix", base, "-f", text, "-o", imatrix)
    sticks = [Yardstick(name, base, folder, arguments) for name in (CHATS, WIKITEXT)]
    plain: dict[str, list[np.ndarray]] = {}
    for way in ways(str(imatrix), str(text)):
        if not re.search(arguments.only, way.name):
            continue
        files = {"ours": folder / "ours.gguf"}
        call(*ours, "quantize", base, files["ours"], *way.ours, "--force")
        if way.peer is not None and arguments.llama_quantize is not None:
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
                twin = {
                    "sha256": digest,
                    "bytes": path.stat().st_size,
                    "bits_per_weight": bits_per_weight(path),
                    "texts": numbers,
                }
                if program == "ours":
                    kind, tokens = way.name.split()[0], [kld for _, kld in measured]
                    if way.name == kind:
                        plain[kind] = tokens
                    elif kind in plain:
                        gains = against(plain[kind], tokens, sticks)
            found[program] = twin
        yield {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": model,
            "way": way.name,
            "windows": {stick.name: len(stick.windows.tokens) for stick in sticks},
            "base": {stick.name: stick.base.value for stick in sticks},
            "same_file": len(found) == 2 and len({x["sha256"] for x in found.values()}) == 1,
            "files": found,
            "less_than_plain": gains,
        }


def bits_per_weight(path: Path) -> float:
    with open_gguf(path) as file:
        sizes = [(tensor.nbytes, math.prod(tensor.shape)) for tensor in file.tensors.values()]
    return 8 * sum(stored for stored, _ in sizes) / sum(values for _, values in sizes)


def against(plain: list[np.ndarray], tokens: list[np.ndarray], sticks: list[Yardstick]) -> dict[str, dict[str, float]]:
    """Return, by text, the decrease in divergence relative to the plain GGUF, and the error of the decrease."""
    means = [mean_of(before - after) for before, after in zip(plain, tokens, strict=True)]
    return {stick.name: {"kld": m.value, "kld_error": m.error} for stick, m in zip(sticks, means, strict=True)}


def stored(path: Path = OUT) -> dict[str, dict[str, Any]]:
    """Return the newest row of every way."""
    return {row["way"]: row for row in map(json.loads, path.read_text().splitlines())}


def compared(path: Path = OUT) -> dict[str, dict[str, Any]]:
    """Return the newest row with a file of llama-quantize, of every way. A run without the program keeps these rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["way"]: row for row in rows if "llama-quantize" in row["files"] and row["model"] == rows[-1]["model"]}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the table of types without calibration, and of --fit: the rows that are stored."""
    header = ("type", "size", "bits per weight", "perplexity", "KL divergence", "same top token", "KL, wikitext-2")
    lines = []
    for way in (way for way in (*PLAIN, *(f"--fit {size}" for size in SIZES)) if way in found):
        file = found[way]["files"]["ours"]
        chats, wikitext = file["texts"][CHATS], file["texts"][WIKITEXT]
        lines.append(
            (
                f"`{way}`" if way.startswith("-") else way,
                f"{file['bytes'] / 1e6:.2f} MB",
                f"{file['bits_per_weight']:.2f}",
                f"{100 * chats['change']:+.2f} ± {100 * chats['change_error']:.2f} %",
                f"{chats['kld']:.4f}",
                f"{100 * chats['same_top']:.1f} ± {100 * chats['same_top_error']:.1f} %",
                f"{wikitext['kld']:.4f}",
            )
        )
    return markdown(header, lines, right=header[1:])


def calibration_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the KL divergence on chats, by type and method."""

    def kld(way: str) -> str:
        return f"{found[way]['files']['ours']['texts'][CHATS]['kld']:.4f}" if way in found else ""

    header = ("type", "size", "plain", *METHODS.values())
    lines = [
        (
            kind,
            f"{found[f'{kind} imatrix']['files']['ours']['bytes'] / 1e6:.2f} MB",
            kld(kind),
            *(kld(f"{kind} {method}") for method in METHODS),
        )
        for kind in (*CALIBRATED, *NEED_IMATRIX)
        if f"{kind} imatrix" in found
    ]
    return markdown(header, lines, right=header[1:])


def gains(found: dict[str, dict[str, Any]]) -> str:
    """Return a line for each method: the types that gain or lose more than two errors on both texts, and the rest."""
    lines = []
    for method, name in METHODS.items():
        groups: dict[str, list[str]] = {"better": [], "worse": [], "neither": []}
        for kind in CALIBRATED:
            means = found.get(f"{kind} {method}", {}).get("less_than_plain", {}).values()
            if means:
                gained = [mean["kld"] / mean["kld_error"] for mean in means]
                groups["better" if min(gained) > 2 else "worse" if max(gained) < -2 else "neither"].append(kind)
        parts = [f"{group} with {', '.join(kinds)}" for group, kinds in groups.items() if kinds]
        if parts:
            lines.append(f"- {name}: {'; '.join(parts)}.")
    return "\n".join(lines)


def peers(both: dict[str, dict[str, Any]]) -> str:
    """Return a sentence on the files of llama-quantize."""
    other = [row["way"] for row in both.values() if not row["same_file"]]
    equal = f"From the same base, llama-quantize wrote identical bytes in {len(both) - len(other)} of {len(both)} files"
    return f"{equal}; the others are {', '.join(other)}." if other else f"{equal}."


def pages(found: dict[str, dict[str, Any]], caches: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the generated sections by page."""
    return {
        "docs/quantizing.md": {
            "quality": table(found),
            "calibration": calibration_table(found),
            "gains": gains(found),
            "peers": peers(compared()),
        },
        "docs/cache.md": {"costs": costs(caches)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--texts", type=Path, default=TEXTS)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--only", default="", help="only rows with a matching name, and no caches")
    parser.add_argument("--table", action="store_true", help="write the tables from the stored rows")
    arguments = parser.parse_args()
    if not arguments.table:
        for path in (arguments.texts, arguments.llama_quantize):
            if path is not None and not path.exists():
                parser.error(f"no such file or folder: {path}")
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(arguments, Path(folder)):
                append(OUT, row)
                print(row["way"], row["same_file"], row["files"]["ours"]["texts"], flush=True)
        if not arguments.only:
            for row in measure(str(DEMO), CHATS, CACHE_WINDOWS, arguments.texts):
                append(CACHES, row)
    for page, sections in pages(stored(), stored_caches()).items():
        update(ROOT / page, {name: lambda text=text: text for name, text in sections.items()})


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
