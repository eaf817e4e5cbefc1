"""The generation loop: admission, continuous batching, sampling, speculative decoding, stop strings and usage counts.

May import: base, backends, options, tokenizer, engine, sampling.
Begin with: core.py (`step`), then request.py, schedule.py, running.py, encodings.py and flights.py; stream.py and
scheduler.py drive the loop.
"""
