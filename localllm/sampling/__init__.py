"""From logits to the next token: chain.py has the samplers, sampler.py runs them, and defaults.py reads the
recommendations of a file. Their options are `localllm.options.SamplingOptions`."""
