"""Files: open untrusted paths safely (regular.py, positioned.py), and write files atomically (outputs.py,
atomic.py)."""
