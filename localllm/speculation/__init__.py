"""Speculative decoding: cheap drafts of the next tokens, verified by the model in one batch.

`localllm.options.SpeculationOptions` says what is asked for. ngram.py and draft.py guess, behind the interface of
drafter.py; rule.py decides what of a guess stands, so that the answer is the model's own; policy.py decides how much
guessing pays, by the costs that costs.py measures; speculator.py is the loop of an answer; setup.py puts it all
together for a model. Nothing is imported here.
"""
