"""Compare every test model on GPU or CPU backends with llama.cpp's logits or embeddings. On PoCL this takes minutes.

    python -m tests.backends.gpu.kit [opencl|cuda|cpu|reference ...] [--models NAME ...] [--out FILE]

Prints the worst normalized mean squared error of each model, and writes a table (CSV) of all backends to FILE.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from localllm.backends import BACKENDS, open_backend
from localllm.backends.base import Backend
from tests.backends.test_kit import logits
from tests.models.kit import EMBEDDERS, KIT
from tests.models.test_embeddings import HALVES, off


def error(backend: Backend, name: str) -> tuple[float, float]:
    """Return the worst normalized mean squared error of a model, and the allowed maximum."""
    if name in EMBEDDERS:
        return off(backend, name), HALVES
    model = KIT[name]
    return model.error(logits(backend, model)), model.limit()


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("backends", nargs="*", choices=[*BACKENDS, []], default=["opencl"], metavar="backend")
    asked.add_argument("--models", nargs="+", choices=[*KIT, *EMBEDDERS], metavar="NAME", default=[*KIT, *EMBEDDERS])
    asked.add_argument("--out", type=Path, metavar="FILE")
    given = asked.parse_args()
    found: dict[str, list[str]] = {name: [] for name in given.models}
    devices, wrong = [], 0
    for kind in given.backends:
        backend = open_backend(kind)
        devices.append(backend.describe())
        print(devices[-1])
        for name in given.models:
            off_by, limit = error(backend, name)
            wrong += off_by >= limit
            found[name].append(f"{off_by:.1e}")
            print(f"{name}: {off_by:.1e}{'' if off_by < limit else ' WRONG'}", flush=True)
        backend.close()
    print(f"{wrong} wrong of {len(found)} models on {len(devices)} backends")
    if given.out:
        with given.out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([["model", *devices], *([n, *r] for n, r in found.items())])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
