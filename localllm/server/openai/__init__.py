"""OpenAI's API: chat completions, completions, responses, embeddings and models, and the rerank API of Jina and Cohere.

`routes.py` is the entrance. Each request becomes a `Turn` or a `Completion`, and its events become OpenAI's objects.
"""
