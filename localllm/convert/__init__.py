"""Convert a Hugging Face folder to the content of a GGUF file, tensor by tensor.

A converted folder has the same interface as an opened GGUF file (`localllm.gguf.GGUFFile`), so the same code reads
both. `stored` and `metadata` hold all keys except general.file_type and general.quantization_version, which the writer
sets. `tensors` is a dict in file order; each tensor has `name`, `format`, `shape`, `row_bytes`, `rows`, `nbytes` and
`read(start, stop)` -> uint8 (stop - start, row_bytes). `format` is a key of `quant.FORMATS`: F32, F16 or BF16 as in the
folder, or MXFP4 for gpt-oss's experts. Vectors, norms and routers are converted to F32, which llama.cpp requires.
Tensor data is read on demand. `notes` are lines for the user.

    with open_checkpoint(folder) as model:
        write_gguf(path, {**model.stored, "general.file_type": 0}, ...)
"""

from localllm.convert.checkpoint import Checkpoint, open_checkpoint
from localllm.convert.errors import ConvertError
from localllm.convert.tensor import LazyTensor

__all__ = ["Checkpoint", "ConvertError", "LazyTensor", "open_checkpoint"]
