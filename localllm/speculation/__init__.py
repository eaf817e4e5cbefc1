"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one batch.

options.py holds the settings; ngram.py and draft.py draft; rule.py accepts or rejects, so that the answer is the
model's own; policy.py decides how much to draft, by the costs that costs.py measures; steps.py is the loop of an
answer; setup.py puts everything together for a model. Nothing is imported here.
"""
