"""What an answer means: reasoning, content and tool calls in its text, and the structure that it must have."""
