"""Time `localllm quantize` and `llama-quantize` in alternation on the same GGUF, with peak memory.

Compare their outputs.

    python benchmarks/quantize.py MODEL-F16.gguf --llama-quantize PATH [--types Q4_K_M,Q8_0] [-t 2] [--rounds 3]
    [--imatrix FILE]

Times whole processes, as a user runs them. localllm also hashes the output and syncs it to the disk; the peer does
neither. So the output folder should be in memory (--folder, default /dev/shm).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from compare import RESULTS, machine
from startup import run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from localllm.gguf import open_gguf

COMPARED = 1 << 24  # bytes of a tensor that are compared at a time


def equal_tensors(one: Path, other: Path) -> tuple[int, int]:
    """Return the number of tensors with the same name, format, shape and bytes in both GGUFs, and the total number."""
    with open_gguf(one) as a, open_gguf(other) as b:
        same = 0
        for name, tensor in a.tensors.items():
            twin = b.tensors.get(name)
            if twin is None or (twin.format, twin.shape) != (tensor.format, tensor.shape):
                continue
            step = max(COMPARED // tensor.row_bytes, 1)
            ranges = [(at, min(at + step, tensor.rows)) for at in range(0, tensor.rows, step)]
            same += all((tensor.read(*r) == twin.read(*r)).all() for r in ranges)
        return same, max(len(a.tensors), len(b.tensors))


def measure(model: Path, kind: str, arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Return one result row."""
    files = [folder / "ours.gguf", folder / "peer.gguf"]
    threads = str(arguments.threads)
    ours = [sys.executable, "-m", "localllm", "quantize", str(model), str(files[0]), kind, "-t", threads, "--force"]
    given = ["--imatrix", str(arguments.imatrix)] if arguments.imatrix else []
    peer = [str(arguments.llama_quantize), *given, str(model), str(files[1]), kind, threads]
    ours += given
    samples = [(run(ours), run(peer)) for _ in range(arguments.rounds)]
    same, tensors = equal_tensors(*files)
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model.name,
        "file_bytes": model.stat().st_size,
        "type": kind,
        "imatrix": arguments.imatrix is not None,
        "threads": arguments.threads,
        "our_seconds": [a[0] for a, _ in samples],
        "peer_seconds": [b[0] for _, b in samples],
        "our_peak_bytes": max(a[1] for a, _ in samples),
        "peer_peak_bytes": max(b[1] for _, b in samples),
        "ratio": median(b[0] / a[0] for a, b in samples),
        "equal_tensors": same,
        "tensors": tensors,
        "equal_files": files[0].read_bytes() == files[1].read_bytes(),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-quantize", type=Path, required=True)
    parser.add_argument("--types", default="Q4_K_M,Q8_0")
    parser.add_argument("--imatrix", type=Path, help="importance matrix for both")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, default=RESULTS / "quantize.jsonl")
    arguments = parser.parse_args()
    for kind in arguments.types.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            row = measure(arguments.model, kind, arguments, Path(folder))
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: row[key] for key in row if key != "machine"}), flush=True)


if __name__ == "__main__":
    main()
