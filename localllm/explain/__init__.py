"""Explain the generation of an answer: what each step read, computed and chose, and how long each part took.

May import: base, plan, backends, options, tokenizer, engine, sampling, generation, model.
Begin with: recorder.py, record.py, then account.py; page.py writes the HTML.
"""
