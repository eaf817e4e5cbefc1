"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one batch.

`localllm.options.SpeculationOptions` holds the options. suffixes.py (with automaton.py and earlier.py) and draft.py
propose tokens, and rule.py defines when a draft is accepted. policy.py learns costs and acceptance rates and decides
how much to draft; costs.py measures passes of one token. setup.py builds these parts for a model. drafts.py drafts for
the requests of a core, each from the source that promises the larger gain. This module imports nothing.
"""
