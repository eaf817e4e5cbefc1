"""Constrained decoding: grammars for a schema, a regular expression or tool calls, and a budget for reasoning.

May import: base, options, sandbox, tokenizer, template, sampling, output.
Begin with: request.py (the constraint of a request), then build.py and constraint.py (llguidance).
"""
