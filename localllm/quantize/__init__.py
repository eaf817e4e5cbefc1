"""Quantize a model (a GGUF file or a Hugging Face folder) to a GGUF file.

`source` opens the input. `jobs` chooses a format for every tensor and adds up sizes. `conversion` streams the tensors
through worker threads into the file. `quant` converts numbers to blocks.
"""
