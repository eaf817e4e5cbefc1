"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one batch.

`localllm.options.SpeculationOptions` holds the options. ngram.py and draft.py draft, rule.py says when a draft is
accepted, policy.py decides how much to draft by the costs that costs.py measures, setup.py builds everything for a
model. `localllm.scheduler.drafts` drafts for the requests of a core. This module imports nothing.
"""
