"""From logits to the next token: options.py holds the settings, chain.py the samplers, sampler.py runs them.

Nothing is imported here, so that the command line can read the defaults (options.py) without loading NumPy.
"""
