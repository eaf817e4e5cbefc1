"""Text diffusion: the masked tokens of a canvas are unmasked step by step (docs/diffusion.md).

May import: base, options, engine, sampling, loading.
Begin with: model.py, then canvas.py (the steps), choice.py (proposals) and schedule.py (tokens per step).
"""
