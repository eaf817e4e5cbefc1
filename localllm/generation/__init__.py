"""The pieces of an answer: prompt.py reads a prompt, decoding.py yields tokens, text.py turns tokens into text,
stopping.py finds stop strings, statistics.py counts and times. `Session.generate` composes them.
"""
