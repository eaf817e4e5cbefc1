"""Terminal functions that commands share: escaped output, streamed answers, saved conversations, signals."""
