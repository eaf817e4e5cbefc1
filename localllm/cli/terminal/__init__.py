"""What the commands share at the terminal: guarded output, answers that stream, kept conversations, signals."""
