"""From logits to the next token: chain.py holds the samplers, sampler.py runs them, and defaults.py reads what a file
recommends. Their options are `localllm.options.SamplingOptions`.
"""
