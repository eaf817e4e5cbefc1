"""From logits to the next token: the samplers, the chain that runs them, and the interface of constraints.

May import: base, options, engine.
Begin with: sampler.py, then chain.py. Their options are `localllm.options.SamplingOptions`.
"""
