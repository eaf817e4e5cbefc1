"""Run one llama-bench test with the package llama-cpp-python, for compare.py on machines without llama-bench.

    python benchmarks/llama_cpp_bench.py -m MODEL.gguf [-t 2] -p 512 | -n 128 [-d 0] [--repack 0] [-fa 1] [--copies]

Options, JSON names and method are the same as in llama-bench: batches of 2048 random tokens, a warm-up run, and tokens
decoded and awaited one at a time. Before each run the KV cache is cleared and filled to its depth. With --copies only
512 tokens are evaluated to fill the cache, and their cache rows are repeated to the depth (`llama_cpp_state`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from time import perf_counter_ns
from typing import Any

import llama_cpp_state

BATCH, PHYSICAL_BATCH = 2048, 512
COPIED = 512  # tokens whose cache rows are repeated with --copies


class Peer:
    """A model and a context in llama.cpp. Raises SystemExit with one line if llama.cpp cannot run the model."""

    def __init__(self, api: Any, options: argparse.Namespace) -> None:
        self._api = api
        # The callback must stay alive, because llama.cpp may call it at any time.
        self._log = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._log, None)
        api.llama_backend_init()
        of_model = api.llama_model_default_params()
        of_model.use_extra_bufts = bool(options.repack)
        model = api.llama_model_load_from_file(str(options.model).encode(), of_model)
        if not model:
            raise SystemExit(f"{options.model}: llama.cpp cannot load it")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        of_context = api.llama_context_default_params()
        of_context.n_ctx = options.depth + options.prompt + options.answer
        of_context.n_batch, of_context.n_ubatch = BATCH, options.physical_batch
        of_context.n_threads = of_context.n_threads_batch = options.threads
        of_context.flash_attn_type = options.flash_attention
        of_context.type_k, of_context.type_v = (_type(api, name) for name in (options.keys, options.values))
        self._context = api.llama_init_from_model(model, of_context)
        if not self._context:
            raise SystemExit(f"{options.model}: llama.cpp makes no context of these options")

    def clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def decode(self, tokens: Sequence[int]) -> None:
        """Append tokens to the context batch by batch, and wait for the last batch."""
        for start in range(0, len(tokens), BATCH):
            piece = tokens[start : start + BATCH]
            array = (ctypes.c_int32 * len(piece))(*piece)
            error = self._api.llama_decode(self._context, self._api.llama_batch_get_one(array, len(piece)))
            if error:
                raise SystemExit(f"llama_decode returned {error}")
        self._api.llama_synchronize(self._context)

    def lengthen(self, cells: int) -> None:
        """Repeat the cells of the KV cache until it has `cells` cells."""
        data = llama_cpp_state.repeated(self._state(), cells)
        self.clear()
        array = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if not self._api.llama_state_seq_set_data(self._context, array, len(data), 0):
            raise SystemExit("llama.cpp does not take the longer state")

    def _state(self) -> bytes:
        size = self._api.llama_state_seq_get_size(self._context, 0)
        array = (ctypes.c_uint8 * size)()
        return bytes(array[: self._api.llama_state_seq_get_data(self._context, array, size, 0)])


def _type(api: Any, name: str) -> int:
    number = getattr(api, f"GGML_TYPE_{name.upper()}", None)
    if number is None:
        raise SystemExit(f"llama.cpp has no type '{name}'")
    return int(number)


def samples(peer: Peer, prompt: int, answer: int, depth: int, repetitions: int, copies: bool = False) -> list[int]:
    """Return the time of each repetition in nanoseconds."""
    chance = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(peer.vocabulary) for _ in range(count)]

    def run(prompt: int, answer: int) -> None:
        peer.decode(tokens(prompt))
        for token in tokens(answer):
            peer.decode([token])

    run(prompt, min(answer, 1))
    found = []
    for _ in range(repetitions):
        peer.clear()
        peer.decode(tokens(min(depth, COPIED) if copies else depth))
        if copies and depth > COPIED:
            peer.lengthen(depth)
        start = perf_counter_ns()
        run(prompt, answer)
        found.append(perf_counter_ns() - start)
    return found


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option: Callable[..., object] = parser.add_argument
    option("-m", "--model", type=Path, required=True)
    option("-t", "--threads", type=int, default=2)
    option("-p", "--prompt", type=int, default=0)
    option("-n", "--answer", type=int, default=0)
    option("-d", "--depth", type=int, default=0)
    option("-r", "--repetitions", type=int, default=5)
    option("-ub", "--physical-batch", type=int, default=PHYSICAL_BATCH)
    option("--repack", type=int, default=1, choices=(0, 1))
    option("-fa", "--flash-attention", type=int, default=-1, choices=(-1, 0, 1))
    option("-ctk", "--keys", default="f16")
    option("-ctv", "--values", default="f16")
    option("--copies", action="store_true")
    option("-o", "--output", default="json", choices=("json",))
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    try:
        import llama_cpp
    except ImportError:
        raise SystemExit("llama-cpp-python is not installed: pip install it, or give --llama-bench PATH") from None
    if (options.prompt > 0) == (options.answer > 0):
        raise SystemExit("give one of -p and -n: tokens of a prompt, or of an answer")
    peer = Peer(llama_cpp, options)
    count = options.prompt + options.answer
    found = samples(peer, options.prompt, options.answer, options.depth, options.repetitions, options.copies)
    result = {
        "build_commit": f"llama-cpp-python {llama_cpp.__version__}",
        "build_number": 0,
        "model_filename": str(options.model),
        "n_threads": options.threads,
        "type_k": options.keys,
        "type_v": options.values,
        "flash_attn": options.flash_attention,
        "repack": bool(options.repack),
        "n_prompt": options.prompt,
        "n_gen": options.answer,
        "n_depth": options.depth,
        "copies": options.copies,
        "avg_ns": round(mean(found)),
        "avg_ts": mean(count * 1e9 / ns for ns in found),
        "samples_ns": found,
    }
    json.dump([result], sys.stdout)
    print()


if __name__ == "__main__":
    main()
