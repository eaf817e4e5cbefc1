"""Fuzzers: hostile files, templates and processes, and a runner that watches what they do.

    python -m tests.fuzz KIND --seed N --cases N [--seconds S]

A case follows from (kind, seed, number) alone and runs in a forked child. So a signal, a hang, memory above 1 GB, a
traceback and an ugly message are all seen, each with its case. `case` defines a kind, `runner` runs it.
"""
