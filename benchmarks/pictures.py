"""Draw the figures of docs/speed.md from the stored results: the kernels' roofline, and decode speed by context depth.

    pip install matplotlib
    python benchmarks/pictures.py

Reads results/kernels.jsonl and results/compare.jsonl, writes roofline.svg and depth.svg into docs/pictures.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from compare import RESULTS, stored

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
matplotlib.rcParams["svg.hashsalt"] = "localllm"  # makes the SVGs reproducible


def newest(path: Path) -> list[dict[str, Any]]:
    """Return the newest row of every format, for the device of the last row in the results."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return list({line["format"]: line for line in lines if line["device"] == lines[-1]["device"]}.values())


def roofline(rows: list[dict[str, Any]], out: Path) -> None:
    """Plot operations per second against operations per byte of weights.

    Each format has one point for 1 row and one for 512 rows.
    """
    bandwidth = median(row["roof_gb_per_s"] for row in rows)
    peak = median(row["byte_peak_gop_per_s"] for row in rows)
    figure, axes = plt.subplots(figsize=(8, 5))
    xs = [0.3, peak / bandwidth, 1e4]
    axes.plot(xs, [min(x * bandwidth, peak) for x in xs], color="black", linewidth=1)
    for many, marker in ((False, "o"), (True, "s")):
        for row in rows:
            intensity = 16 / row["bits_per_weight"] * (512 if many else 1)
            rate = row["matmul_gop_per_s"] if many else row["one_row_gb_per_s"] * intensity
            axes.plot(intensity, rate, marker, markersize=4, color="tab:orange" if many else "tab:blue")
            axes.annotate(row["format"], (intensity, rate), fontsize=5, xytext=(3, 2), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of weights", ylabel="billion operations a second")
    title = f"{rows[-1]['device']}: {bandwidth:.0f} GB/s, {peak:.0f} GOP/s; one row (blue) and 512"
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def depth(model: str, out: Path) -> None:
    """Plot decode speed in tokens/s against the tokens in the cache, for localllm and the peer."""
    found = [row for row in stored(RESULTS / "compare.jsonl") if row.model == model and row.test.startswith("tg")]
    device = next(row.device for row in reversed(found) if "@" in row.test)
    points = sorted((int(row.test.partition("@")[2] or 0), row) for row in found if row.device == device)
    figure, axes = plt.subplots(figsize=(8, 4))
    depths = [at for at, _ in points]
    axes.plot(depths, [median(row.ours) for _, row in points], "o-", label="localllm")
    axes.plot(depths, [median(row.peer_repacked) for _, row in points], "s--", label="llama.cpp")
    axes.set(xlabel="tokens in the cache (F16)", ylabel="tokens a second", ylim=(0, None))
    axes.set_title(f"{model}, {device}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    roofline(newest(RESULTS / "kernels.jsonl"), PICTURES / "roofline.svg")
    depth("1b-Q4_0.gguf", PICTURES / "depth.svg")


if __name__ == "__main__":
    main()
