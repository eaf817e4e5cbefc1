"""Parse streamed output into reasoning, content and tool calls.

May import: template, generation.
Begin with: reader.py, then calls.py (the parsers of calls) and incoming.py (the input of the parsers).
"""
