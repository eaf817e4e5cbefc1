"""Generates answers.

core.py is the loop, stream.py steps it for consumers of events, text.py converts tokens to text and finds stop strings,
statistics.py counts and times, constraint.py is the interface for constrained decoding, and exclusive.py lets one
thread at a time use an engine.
"""
