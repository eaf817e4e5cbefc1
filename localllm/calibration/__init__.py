"""What a model does with its weights on a text, and what follows for quantizing them.

`observe` runs a text and shows the inputs of every matrix; `imatrix` sums them up as llama.cpp's importance matrices,
`hessian` as second moments. `method` stores tensors by AWQ or GPTQ on these grounds; `sensitivity` measures what a
format costs each tensor, and `mix` chooses by it.
"""
