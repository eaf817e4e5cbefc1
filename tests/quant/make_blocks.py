"""Make blocks.npz, a part of the reference data for the tests in tests/quant.

Run from the repository root, with shared/ next to it: python -m tests.quant.make_blocks
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.conftest import SHARED_DATA

ROWS = [20, 43, 44, 52]  # rows of the input: heavy tails, a constant, values of about 1e-6, outliers
VALUES = 256  # values per row with stored results

if __name__ == "__main__":
    folder = SHARED_DATA / "formats"
    source = np.load(folder / "input.npz")
    arrays = {"x": source["x"][ROWS], "imatrix": source["imatrix"]}
    for path in sorted(folder.glob("*.npz")):
        if path.stem == "input":
            continue
        reference = np.load(path)
        for kind in ("plain", "imatrix"):
            if f"bytes_{kind}" in reference:
                arrays[f"{path.stem}.{kind}"] = reference[f"bytes_{kind}"][ROWS]
        arrays[f"{path.stem}.values"] = reference["values_imatrix"][ROWS, :VALUES]
    np.savez_compressed(Path(__file__).with_name("blocks.npz"), **arrays)
