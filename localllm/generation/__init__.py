"""The pieces an answer is made of: prompt.py reads a prompt, steps.py says how tokens come, text.py turns tokens into
text and watches for stop strings, statistics.py counts and times. `Session.generate` composes them.
"""
