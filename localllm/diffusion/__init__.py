"""Text diffusion: masked tokens of a canvas are unmasked step by step (docs/diffusion.md), by pure functions.

`schedule` sets how many tokens to unmask per step, `choice` proposes tokens and selects the positions to unmask,
`canvas` runs the steps as a generator, and `reading` reads a file's diffusion settings.
"""
