"""OpenAI's responses API: items in, items out. Nothing is stored, so a request has the whole conversation."""
