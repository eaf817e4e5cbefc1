"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one batch.

`localllm.options.SpeculationOptions` holds the options. ngram.py and draft.py draft, rule.py says when a draft is
accepted, policy.py decides how much to draft from the pass times that costs.py measures, and setup.py builds these
parts for a model. `localllm.generation.speculation.drafts` drafts for the requests of a core. This module imports
nothing.
"""
