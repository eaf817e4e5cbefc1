"""Text diffusion: a canvas of masked tokens settles step by step (docs/diffusion.md). Pure functions, one generator.

`schedule` says how many tokens settle in a step, `choice` proposes tokens and picks the ones that settle, `canvas` runs
the steps, and `reading` reads what a file says about it.
"""
