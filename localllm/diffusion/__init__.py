"""Text diffusion: masked tokens of a canvas are unmasked step by step (docs/diffusion.md). Pure functions, one
generator.

`schedule` sets how many tokens to unmask per step, `choice` proposes tokens and selects the positions to unmask,
`canvas` runs the steps, and `reading` reads a file's diffusion settings.
"""
