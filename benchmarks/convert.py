"""Compare converted models with transformers and llama.cpp, for every model of tests/localllm/convert/checkpoints.py.

    python -m benchmarks.convert --llama LLAMA_CPP     # a tree with build/bin; needs torch, transformers and g++

Each model is created, saved as a checkpoint, and converted to a GGUF with all weights as F32. The table holds the
largest normalized mean squared error over positions against transformers' logits, for our reference backend and for
llama.cpp. It also counts the texts whose token ids in llama.cpp differ from the checkpoint's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.llama_logits import build
from localllm.convert import open_checkpoint
from tests.localllm.convert.checkpoints import MODELS
from tests.localllm.convert.hf_make import logits, make
from tests.localllm.convert.hf_tokenizers import TEXT
from tests.localllm.convert.support import logits_of, write_f32
from tests.localllm.convert.weights import ids
from tests.models.support import nmse

ROOT = Path(__file__).resolve().parent.parent


def texts() -> list[str]:
    folder = ROOT.parent / "shared" / "data" / "text"
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    return [TEXT, *(path.read_text(encoding="utf-8", errors="replace")[20_000:60_000] for path in files)]


def one(name: str, peer: Path, work: Path) -> dict[str, object]:
    """Return the table row of one model."""
    import tokenizers

    folder, gguf, out = work / "model", work / "model.gguf", work / "out"  # llama.cpp looks for phi-3 in the name
    theirs = logits(make(name, folder))
    with open_checkpoint(folder) as model:
        ours, notes = logits_of(model, ids()), model.notes
        write_f32(model, gguf)
    subprocess.run([peer, gguf, out, "ids", *map(str, ids())], check=True)
    peers = np.fromfile(out, np.float32).reshape(theirs.shape)
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    differing = 0
    for text in texts():
        (work / "text").write_text(text, encoding="utf-8", newline="")
        subprocess.run([peer, gguf, out, "text", work / "text"], check=True)
        differing += np.fromfile(out, np.int32).tolist() != own.encode(text).ids
    return {
        "model": name,
        "architecture": model.metadata["general.architecture"],
        "nmse_reference": float(nmse(ours, theirs).max()),
        "nmse_llama_cpp": float(nmse(peers, theirs).max()),
        "texts": len(texts()),
        "texts_with_other_ids": differing,
        "notes": list(notes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "convert.jsonl")
    arguments = parser.parse_args()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        peer = Path(folder) / "logits"
        build(arguments.llama.resolve(), peer)
        rows = []
        for name in MODELS:
            work = Path(folder) / name
            work.mkdir()
            rows.append({"when": when, **one(name, peer, work)})
            print("{model:18} {nmse_reference:8.1e} {nmse_llama_cpp:8.1e} {texts_with_other_ids}".format(**rows[-1]))
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
