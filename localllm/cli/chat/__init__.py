"""The chat in a terminal: the line editor, slash commands, settings, and files kept between sessions."""
