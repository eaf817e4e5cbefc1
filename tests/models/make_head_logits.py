"""Add llama.cpp's logits of next-token prediction heads (F32 cache, no flash attention) to data/head_logits.npz.

A development tool that needs gguf and llama-cpp-python. Run from the repository, with names of `tests.models.headed`:

    python -m tests.models.make_head_logits NAME...

Hidden states come from a llama.cpp context for the model. Row t in the context for heads is token t + 1 and the hidden
state of token t: 32 rows in one batch, and the others one by one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as llama
import llama_cpp.llama_cpp_ext as extended
import numpy as np

from tests.models.headed import HEADED
from tests.models.support import MemoryWeight

DATA = Path(__file__).parent / "data" / "head_logits.npz"
PROMPT, HEADS = 32, 1  # LLAMA_CONTEXT_TYPE_MTP


def write(metadata: dict[str, Any], tensors: dict[str, MemoryWeight], path: Path) -> None:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture" and not key.startswith("GGUF."):
            own = np.asarray(value)
            if own.ndim:
                writer.add_array(key, own.tolist())
            elif own.dtype.kind == "b":
                writer.add_bool(key, bool(value))
            elif own.dtype.kind in "iu":
                writer.add_int32(key, int(value)) if own < 0 else writer.add_uint32(key, int(value))
            elif own.dtype.kind == "f":
                writer.add_float32(key, float(value))
            else:
                writer.add_string(key, str(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def context_of(model: Any, kind: int) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 2
    params.type_k = params.type_v = 0  # GGML_TYPE_F32
    params.flash_attn_type, params.ctx_type = 0, kind
    context = llama.llama_init_from_model(model, params)
    assert context, "llama.cpp made no context"
    extended.llama_set_embeddings_nextn(context, True, kind == HEADS)
    return context


def decode(context: Any, tokens: list[int], start: int, rows: np.ndarray | None = None) -> None:
    """Evaluate tokens from this position on. A head also gets hidden states (T, width)."""
    batch = llama.llama_batch_init(len(tokens), 0 if rows is None else rows.shape[1], 1)
    if rows is not None:  # set the token ids too, because a batch with embeddings has no array for them
        other = llama.llama_batch_init(len(tokens), 0, 1)
        batch.token, room = other.token, np.ctypeslib.as_array(batch.embd, rows.shape)
        room[:] = rows
    batch.n_tokens = len(tokens)
    for number, token in enumerate(tokens):
        batch.token[number], batch.pos[number], batch.n_seq_id[number] = token, start + number, 1
        batch.seq_id[number][0], batch.logits[number] = 0, 1
    assert llama.llama_decode(context, batch) == 0, "llama.cpp does not evaluate this"


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    params = llama.llama_model_default_params()
    params.n_gpu_layers, params.load_mtp = 0, True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"{path}: llama.cpp does not load it"
    width, words = llama.llama_model_n_embd_out(model), llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    first = context_of(model, 0)
    decode(first, tokens, 0)
    hidden = np.ctypeslib.as_array(extended.llama_get_embeddings_nextn(first), (len(tokens), width)).copy()
    head, results = context_of(model, HEADS), []
    for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, len(tokens) - 1))]:
        decode(head, tokens[start + 1 : stop + 1], start, hidden[start:stop])
        made = [llama.llama_get_logits_ith(head, row) for row in range(stop - start)]
        results += [np.ctypeslib.as_array(row, (words,)).copy() for row in made]
    return np.array(results)


def main(names: list[str]) -> None:
    llama.llama_backend_init()
    with np.load(DATA) as file:
        stored = dict(file)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path, headed = Path(folder) / "model.gguf", HEADED[name]
            write(*headed.loaded(), path)
            stored[name] = logits(path, headed.tokens)[None]
    np.savez_compressed(DATA, **stored)


if __name__ == "__main__":
    main(sys.argv[1:])
