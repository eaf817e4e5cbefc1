"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one batch.

`localllm.options.SpeculationOptions` holds the options. ngram.py and draft.py draft, behind the interface of
drafter.py. rule.py accepts or rejects, so that the distribution stays the model's. policy.py decides how much to draft,
by the costs that costs.py measures. speculator.py is the loop of an answer; setup.py builds everything for a model.
This module imports nothing.
"""
