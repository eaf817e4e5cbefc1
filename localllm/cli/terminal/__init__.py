"""Terminal functions that commands share: guarded output, streamed answers, saved conversations, signals."""
