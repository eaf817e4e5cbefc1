"""Convert Hugging Face checkpoints. An open checkpoint has the interface of an open GGUF file, and each tensor is
converted when it is read.

May import: base, quant, plan, models, sandbox, tokenizer.
Begin with: checkpoint.py (`open_checkpoint`), then recipe.py, names.py and assembly.py.
"""

from localllm.convert.checkpoint import Checkpoint, open_checkpoint
from localllm.convert.encoders import EncoderCheckpoint
from localllm.convert.errors import ConvertError
from localllm.convert.tensor import LazyTensor

__all__ = ["Checkpoint", "ConvertError", "EncoderCheckpoint", "LazyTensor", "open_checkpoint"]
