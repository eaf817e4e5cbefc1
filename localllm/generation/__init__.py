"""How answers are made: core.py is the loop, stream.py steps it for readers, text.py turns tokens into text,
stopping.py finds stop strings, statistics.py counts and times, exclusive.py lets one thread at a time into an engine.
"""
