"""Recipes: how each model family's tensors and keys are converted to GGUF. table.py lists them all."""
