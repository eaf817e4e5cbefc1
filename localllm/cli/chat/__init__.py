"""The chat in a terminal: the line editor, slash commands, settings, and what is kept between sessions."""
