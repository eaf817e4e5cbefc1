"""All cases and inputs of the reference kit on several backends: the errors of every media chunk as a table.

    python -m tests.models.encoders.table reference cpu opencl --out benchmarks/results/media.csv

A case is within the limits if `rows` is below 2e-5 and `centered` below 1e-4, or three times the kit's F16 column.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from localllm.backends import open_backend
from localllm.engine.encoder import Encoder
from localllm.models import ModelError
from localllm.models.encoders import encoder_of
from tests.models.encoders.kit import FOLDER, Case
from tests.models.encoders.support import CENTERED, ROWS

FIELDS = ("case", "backend", "input", "chunk", "tokens", "rows", "centered", "rows_limit", "centered_limit", "status")


def limits() -> dict[str, tuple[float, float]]:
    """Return the limits of `rows` and `centered` by case, from the kit's list."""
    found = {}
    for line in (FOLDER / "MODELS.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 10 and (FOLDER / f"{cells[1]}.npz").exists():
            numbers = [float(n) for n in re.findall(r"\d+e-\d+", cells[9])]
            if len(numbers) >= 2:
                found[cells[1]] = max(ROWS, 3 * numbers[0]), max(CENTERED, 3 * numbers[1])
    return found


def rows(name: str, backends: list[str], limit: tuple[float, float]) -> Iterator[dict[str, object]]:
    case = Case(name)
    metadata, tensors = case.loaded()
    try:
        chunks = list(case.chunks())
        models = {chunk.kind for chunk in chunks}
        for kind in models:
            encoder_of(metadata, tensors, kind)  # type: ignore[arg-type]
    except (ModelError, KeyError) as error:
        yield {"case": name, "status": f"not supported: {str(error).partition(';')[0]}"}
        return
    for backend_name in backends:
        backend = open_backend(backend_name)
        encoders = {kind: Encoder(backend, encoder_of(metadata, tensors, kind)) for kind in models}  # type: ignore[arg-type]
        for chunk in chunks:
            embeddings = encoders[chunk.kind].encode(chunk.tensors, chunk.flags)
            errors = case.errors(chunk, embeddings)
            passed = errors["rows"] < limit[0] and errors["centered"] < limit[1]
            yield {
                "case": name, "backend": backend_name, "input": chunk.name, "chunk": chunk.number,
                "tokens": len(embeddings), "rows": f"{errors['rows']:.1e}", "centered": f"{errors['centered']:.1e}",
                "rows_limit": f"{limit[0]:.0e}", "centered_limit": f"{limit[1]:.0e}",
                "status": "passed" if passed else "failed",
            }  # fmt: skip
        for encoder in encoders.values():
            encoder.close()
        backend.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="+", choices=["reference", "cpu", "opencl", "cuda"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="cases")
    options, failed = parser.parse_args(), 0
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for name, limit in limits().items():
            if options.only and name not in options.only:
                continue
            start, status = perf_counter(), Counter[str]()
            for row in rows(name, options.backends, limit):
                writer.writerow(row)
                file.flush()  # an hour of DeepSeek-OCR on the reference is not lost if it is stopped
                status[str(row["status"])] += 1
            failed += status["failed"]
            told = ", ".join(f"{count} rows {each}" for each, count in status.items())
            print(f"{name}: {told}, {perf_counter() - start:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
