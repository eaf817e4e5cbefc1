"""Reads and writes GGUF: `open_gguf` validates a file and returns its metadata and tensors; `write_gguf` writes a file.

May import: base, quant.
Begin with: file.py, then header.py. Little-endian versions 2 and 3, single and split files.
"""

from __future__ import annotations

from localllm.gguf.file import GGUFFile, GGUFTensor, open_gguf
from localllm.gguf.layout import GGUFError
from localllm.gguf.strings import StringArray
from localllm.gguf.writer import NewTensor, file_size, write_gguf

__all__ = ["GGUFError", "GGUFFile", "GGUFTensor", "NewTensor", "StringArray", "file_size", "open_gguf", "write_gguf"]
