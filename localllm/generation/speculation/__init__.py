"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one batch.

`localllm.options.SpeculationOptions` holds the options. suffixes.py (with automaton.py and earlier.py) and draft.py
propose tokens, and rule.py defines when a draft is accepted. policy.py decides how much to draft from the costs that
costs.py measures; setup.py builds these parts for a model. drafts.py drafts for the requests of a core. This module
imports nothing.
"""
