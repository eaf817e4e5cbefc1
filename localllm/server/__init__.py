"""`localllm serve`: the protocols of OpenAI, Anthropic, Ollama and llama.cpp over one scheduler."""
