"""Fuzzers: files, templates and processes made to do harm, and a runner that sees what they did.

    python -m tests.fuzz KIND --seed N --cases N [--seconds S]

A case is made of (kind, seed, number) alone and runs in a forked child, so that a signal, a hang, memory above 1 GB, a
traceback and an ugly message are all seen and belong to a case. `case` says what a kind is, `runner` runs it.
"""
