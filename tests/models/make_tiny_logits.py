"""Write data/tiny_llama_cpp.npz: llama.cpp's logits for the tiny models (F32 cache, no flash attention).

A development tool that needs gguf and llama-cpp-python. Run from the repository: python -m
tests.models.make_tiny_logits
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as llama
import numpy as np

from tests.models.tiny import PROMPT, TOKENS, VARIANTS, VOCABULARY, Model
from tests.models.tiny_families import FAMILIES


def write(model: Model, path: Path) -> None:
    metadata, tensors = model
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    writer.add_string("tokenizer.ggml.model", "none")
    add = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if key != "general.architecture":
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path: Path) -> np.ndarray:
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 64, 1, 1
    params.type_k = params.type_v = 0  # GGML_TYPE_F32
    params.flash_attn_type = 0  # disabled
    context = llama.llama_init_from_model(model, params)
    rows = []
    for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, len(TOKENS)))]:
        batch = llama.llama_batch_init(stop - start, 0, 1)
        batch.n_tokens = stop - start
        for i in range(stop - start):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(TOKENS[start + i]), start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        assert llama.llama_decode(context, batch) == 0
        for i in range(stop - start):
            rows.append(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (VOCABULARY,)).copy())
        llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return np.array(rows)


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (VARIANTS | FAMILIES).items():
            path = Path(folder) / "model.gguf"
            write(make(), path)
            results[name] = logits(path)
    np.savez_compressed(Path(__file__).parent / "data" / "tiny_llama_cpp.npz", **results)


if __name__ == "__main__":
    main()
