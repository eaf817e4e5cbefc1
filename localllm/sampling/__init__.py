"""Sampling the next token from logits: the samplers, the chain that runs them, and the constraint interface.

May import: base, options, engine.
Begin with: sampler.py, then chain.py. Their options are `localllm.options.SamplingOptions`.
"""
