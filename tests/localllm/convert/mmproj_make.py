"""Build the tiny checkpoints with encoders, and store what llama.cpp's converter and transformers make of them.

    python -m tests.localllm.convert.mmproj_make LLAMA_CPP [CASE...]   # data/mmproj.json.gz and data/mmproj.npz

Needs torch, transformers and the source of llama.cpp.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.mmproj_cases import DATA, TYPES, digests, stored, write
from tests.localllm.convert.mmproj_embed import embed
from tests.localllm.convert.mmproj_settings import CASES, Case


def spec_of(case: Case) -> dict[str, Any]:
    """Return the settings and tensors of a case, as transformers saves them, with the names of the hub's files."""
    if case.tensors:
        return {"config": case.settings, "preparing": case.preparing, "tensors": case.tensors}
    import torch
    import transformers

    config = getattr(transformers, case.config)(**json.loads(json.dumps(case.settings)))
    model = getattr(transformers, case.program)._from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        from safetensors import safe_open

        with safe_open(f"{folder}/model.safetensors", "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
            norms = {name: float(file.get_tensor(name).mean()) for name in shapes if "norm" in name.lower()}
        told = json.loads((Path(folder) / "config.json").read_text())
    tensors = []
    for name, shape in shapes.items():
        if not re.search(case.keeps, name):
            continue
        hub = name
        for pattern, spelling in case.spellings:
            hub = re.sub(pattern, spelling, hub)
        tensors.append([hub, list(shape), norms.get(name, 0.0)])
    return {"config": case.told(told), "preparing": case.preparing, "tensors": tensors}


def converted(folder: Path) -> dict[str, Any]:
    """Return what llama.cpp's converter writes, by type."""
    program = importlib.import_module("convert_hf_to_gguf")
    found = {}
    for name in TYPES:
        out = folder.parent / f"{name}.gguf"
        sys.argv = ["convert", str(folder), "--mmproj", "--outtype", name.lower(), "--outfile", str(out)]
        program.main()
        found[name] = digests(next(folder.parent.glob(f"*{name}.gguf")))
    return found


def main(llama: Path, names: list[str]) -> None:
    sys.path.insert(0, str(llama))
    sys.path.insert(0, str(llama / "gguf-py"))
    path, arrays = DATA / "mmproj.json.gz", DATA / "mmproj.npz"
    table = stored() if path.exists() else {}
    results = dict(np.load(arrays)) if arrays.exists() else {}
    for name in names or CASES:
        case = CASES[name]
        spec = spec_of(case) | {"dtype": case.dtype}
        with tempfile.TemporaryDirectory() as place:
            folder = write(spec, Path(place) / "model")
            if case.converts:
                spec["llama_cpp"] = converted(write(spec, Path(place) / "theirs", case.theirs))
            results |= {f"{name}:{key}": x for key, x in embed(folder, *case.embed).items()}
        table[name] = spec
        print(name, len(spec["tensors"]), "tensors", "llama.cpp" * ("llama_cpp" in spec), "torch" * len(case.embed))
    table = {name: table[name] for name in CASES if name in table}
    packed = json.dumps(table, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(packed, mtime=0))
    if results:
        np.savez_compressed(arrays, **{key: results[key] for key in sorted(results)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
