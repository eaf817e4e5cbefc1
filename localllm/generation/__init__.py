"""From requests to tokens: the loop that admits, batches and samples, speculative decoding, stop strings, usage.

May import: base, backends, options, tokenizer, engine, sampling.
Begin with: core.py (`step`), then request.py, schedule.py and running.py; stream.py and scheduler.py run it.
"""
