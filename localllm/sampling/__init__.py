"""From logits to the next token: options.py says what is asked for, chain.py holds the samplers, sampler.py runs them.

Nothing is imported here, so that the command line can read the defaults (options.py) without loading NumPy.
"""
