"""Writes data/small.npz: small projectors and their embeddings by the kit's float64 programs, which need no other file.

    python -m tests.models.encoders.make_small

Weights and inputs follow from names, by the rules of the kit (see `small`). Where llama.cpp approximates a GELU that
the model's own program has exactly, so do the kit's programs; here they compute the exact one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.encoders.kit import FOLDER, Case, Chunk, module
from tests.models.encoders.small import DATA, SHAPES, input_of

# Cases with an exact GELU in the projector, and in the layers, too.
EXACT = (
    *("qwen2vl", "qwen2.5vl", "qwen3vl", "qwen3.5", "exaone4_5", "pixtral", "mistral3", "lightonocr", "lfm2"),
    *("paddleocr", "kimik25", "llava15", "llava-swapped", "llava-features"),
)
EXACT_LAYERS = ("internvl", "internvl-qknorm", "janus_pro", "llama4")


@contextmanager
def exact(name: str) -> Iterator[None]:
    """Compute the exact GELU where the model of a case has it."""
    numpy = module("reference_numpy")
    gelu, mlp = numpy.gelu, numpy.Net.mlp

    def own(net: Any, x: np.ndarray, first: str, second: str, activation: Any = gelu) -> np.ndarray:
        merges = name in (*EXACT, *EXACT_LAYERS) and ".blk." not in first
        return np.asarray(mlp(net, x, first, second, numpy.gelu_erf if merges and activation is gelu else activation))

    numpy.Net.mlp = own
    if name in EXACT_LAYERS:
        numpy.gelu = numpy.gelu_erf
    try:
        yield
    finally:
        numpy.gelu, numpy.Net.mlp = gelu, mlp


def expected(name: str) -> np.ndarray:
    """Return the embeddings of a case's small input, float64."""
    program, case = module("reference_rest"), Case(name)
    numpy = module("reference_numpy")
    kind = "audio" if SHAPES[name].sound else "vision"
    tensor = input_of(name)
    found = case.original(Chunk(name, 0, kind, (tensor,), (0,) * 8))
    if found is not None:
        return found
    _, forward = program.MODELS[name]
    with case.stored() as z:
        net = numpy.Net(*numpy.load(str(FOLDER / f"{name}.npz"), int(z["seed"])), kind)
    x, net.lead_pad = tensor.astype(np.float64), 0
    net.anyres, net.viewsep = SHAPES[name].flags[3:7], 0
    if forward.__name__ in ("llava", "internvl"):
        return np.asarray(forward(net, x, hf=True))
    return np.asarray(forward(net, [x] if forward.__name__ in ("qwen25", "qwen3", "ling3vl") else x))


def main() -> None:
    make, stored = module("make_mmproj"), {}
    for name in SHAPES:
        with Case(name).stored() as z:
            metadata, tensors, _, _ = make.parse_header(z["header"].tobytes())
            own = {key: value for key, value in metadata.items() if key.startswith("clip.")}
            listed = [(tensor, shape, kind) for tensor, shape, kind, _ in tensors]
            text = json.dumps({"seed": int(z["seed"]), "metadata": own, "tensors": listed}, default=lambda n: n.item())
        stored[f"{name}.header"] = np.frombuffer(text.encode(), np.uint8)
        with exact(name):
            stored[f"{name}.embeddings"] = expected(name).astype(np.float32)
        print(name, stored[f"{name}.embeddings"].shape)
    Path(DATA).parent.mkdir(exist_ok=True)
    np.savez_compressed(DATA, **stored)


if __name__ == "__main__":
    main()
