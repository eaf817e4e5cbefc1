"""Text diffusion: a canvas of masked tokens settles step by step (docs/diffusion.md).

May import: base, options, engine, sampling, loading.
Begin with: model.py, then canvas.py (the steps), choice.py (proposals) and schedule.py (how many settle).
"""
