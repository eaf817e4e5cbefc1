"""`localllm serve`: the HTTP APIs of OpenAI, Anthropic, Ollama and llama.cpp over one scheduler.

May import: base, models, gguf, options, sandbox, hub, tokenizer, engine, media, template, embedding, generation,
output, constrained, loading, saved, model.
Begin with: app.py, then service.py, served.py and turn.py; each API has its own package.
"""
