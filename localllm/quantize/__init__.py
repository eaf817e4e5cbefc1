"""Quantize a GGUF file or a Hugging Face checkpoint to a GGUF file, with or without calibration on a text.

May import: base, quant, plan, backends, gguf, options, convert, loading, model, evaluation.
Begin with: source.py, jobs.py (a format per tensor), then conversion.py; calibration/ measures a model.
"""
