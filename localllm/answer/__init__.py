"""The parts of an answer: reasoning, content and tool calls in its text, and the structure that constrains it."""
