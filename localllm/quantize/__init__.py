"""From a model, a GGUF file or a Hugging Face folder, to a GGUF file in other formats.

`source` opens what is to be quantized, `plan` decides a format for every tensor and adds up sizes, `conversion` streams
the tensors through worker threads into the file. How numbers become blocks is `quant`'s business.
"""
