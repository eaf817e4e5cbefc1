"""Write data/llama_cpp.json: the results of llama.cpp's samplers for the logits in llama_cpp_cases.py.

A development tool that needs llama-cpp-python. Run from the repository: python -m
tests.localllm.sampling.make_llama_cpp
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from localllm.gguf import open_gguf
from localllm.options import SamplingOptions
from localllm.tokenizer import Tokenizer
from tests.localllm.sampling.llama_cpp_cases import FOLLOWING, INFILL, LISTED, STEPS, infill_logits, logits


class Candidate(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class Candidates(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(Candidate)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


def sampler(name: str, types: Sequence[Any], *values: Any) -> int:
    make = getattr(llama._lib, "llama_sampler_init_" + name)
    make.argtypes, make.restype = list(types), ctypes.c_void_p
    return int(make(*values))


FLOAT, WHOLE, SEED, SIZE = ctypes.c_float, ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t


def chain_of(options: SamplingOptions, size: int) -> list[int]:
    """Return the samplers in the order of llama.cpp's common/sampling.cpp."""
    heat = sampler("temp", [FLOAT], options.temperature)
    pair = (options.mirostat_tau, options.mirostat_eta)
    if options.mirostat == 1:
        return [heat, sampler("mirostat", [WHOLE, SEED, FLOAT, FLOAT, WHOLE], size, 7, *pair, 100)]
    if options.mirostat == 2:
        return [heat, sampler("mirostat_v2", [SEED, FLOAT, FLOAT], 7, *pair)]
    return [
        sampler("top_k", [WHOLE], options.top_k),
        sampler("min_p", [FLOAT, SIZE], options.min_p, 0),
        heat,
        sampler("adaptive_p", [FLOAT, FLOAT, SEED], options.adaptive_target, options.adaptive_decay, 7),
    ]


def apply(chain: Sequence[int], row: np.ndarray) -> tuple[dict[int, float], int]:
    """Run a sampler chain. Return the probabilities of the remaining tokens, and the sampled token."""
    data = (Candidate * len(row))(*[Candidate(token, float(logit), 0.0) for token, logit in enumerate(row)])
    found = Candidates(data, len(row), -1, False)
    for one in chain:
        llama._lib.llama_sampler_apply(ctypes.c_void_p(one), ctypes.byref(found))
    left = [(data[place].id, data[place].logit) for place in range(found.size)]
    peak = max(logit for _, logit in left)
    weights = {token: float(np.exp(np.float64(logit) - peak)) for token, logit in left}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items() if weight}, int(data[found.selected].id)


def main() -> None:
    llama.llama_backend_init()
    llama._lib.llama_sampler_apply.restype = None
    facts: dict[str, Any] = {"following": {}, "infill": []}
    for case, changed in FOLLOWING.items():
        options = SamplingOptions(**{"top_k": 0, "min_p": 0.0, **changed})
        chain = chain_of(options, len(logits(case, 0)))
        steps = []
        for step in range(STEPS):
            found, chosen = apply(chain, logits(case, step))
            for one in chain:
                llama._lib.llama_sampler_accept(ctypes.c_void_p(one), WHOLE(chosen))
            likely = sorted(found, key=lambda token: (-found[token], token))[:LISTED]
            steps.append([chosen, len(found), {str(token): float(f"{found[token]:.5g}") for token in likely}])
        facts["following"][case] = steps
    with as_file(files("localllm.models.demo") / "demo.gguf") as path:
        tokenizer = Tokenizer.from_metadata(open_gguf(path).metadata)
        params = llama.llama_model_default_params()
        params.vocab_only = True
        vocab = llama.llama_model_get_vocab(llama.llama_model_load_from_file(str(path).encode(), params))
    pieces = list(map(partial(tokenizer.piece, special=False), range(tokenizer.vocab_size)))
    for case in range(INFILL):
        row, most = infill_logits(case, pieces, sorted(tokenizer.eog))
        chain = [sampler("top_k", [WHOLE], most), sampler("infill", [ctypes.c_void_p], vocab)]
        found = apply(chain, row)[0]
        facts["infill"].append({str(token): float(f"{p:.5g}") for token, p in found.items()})
    folder = Path(__file__).with_name("data")
    folder.mkdir(exist_ok=True)
    (folder / "llama_cpp.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
