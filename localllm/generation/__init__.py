"""The pieces of an answer: prompt.py reads a prompt, decoding.py yields tokens, text.py turns tokens into text,
stopping.py finds stop strings, statistics.py counts and times, exclusive.py refuses a second thread.
`Session.generate` composes them.
"""
