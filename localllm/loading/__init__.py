"""Loading a model: resolve its name, open the GGUF, bind the plan to a backend.

May import: base, plan, models, backends, gguf, options, sandbox, hub, tokenizer, engine, media, template, sampling,
generation, constrained.
Begin with: resolve.py, loader.py (`bind`), then loaded_model.py and its subclasses in predictor.py and templated.py.
"""
