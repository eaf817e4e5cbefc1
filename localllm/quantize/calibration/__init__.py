"""Record the inputs of a model's weight matrices on a text, as a basis for quantizing them.

`observe` runs a text and provides the inputs of every matrix. `imatrix` sums them into llama.cpp's importance matrices,
and `hessian` into second moments. `method` stores tensors by AWQ or GPTQ. `sensitivity` measures the quality loss of
each tensor in a format, and `mix` chooses formats by this loss.
"""
