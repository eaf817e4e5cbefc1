"""OpenAI's responses API: items in, items out. Nothing is stored, so a request contains the full conversation."""
