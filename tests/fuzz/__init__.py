"""Fuzzers for hostile files, templates and processes, and a runner that watches their effects.

    python -m tests.fuzz KIND --seed N --cases N [--seconds S]

A case is determined by (kind, seed, number) and runs in a forked child process. The runner detects signals,
hangs, memory above 1 GB, tracebacks and unclear messages, and assigns them to their case. `case` defines a
kind, `runner` runs it.
"""
