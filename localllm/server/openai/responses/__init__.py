"""OpenAI's responses API, whose input and output are lists of items. Nothing is stored, so a request contains the full
conversation."""
