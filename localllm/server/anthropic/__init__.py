"""Anthropic's API: messages, and how many tokens they have. `routes.py` is the entrance."""
