"""Fuzzers: hostile files, templates and processes, and a runner that watches their effects.

    python -m tests.fuzz KIND --seed N --cases N [--seconds S]

A case is determined by (kind, seed, number) and runs in a forked child. So a signal, a hang, memory above 1 GB, a
traceback and an unclear message are all detected, each with its case. `case` defines a kind, `runner` runs it.
"""
