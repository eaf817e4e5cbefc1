"""Facts about this computer that Python's standard library lacks: processor, memory, and energy.

Each fact has a table with one source per operating system. `system.py` makes the system calls.
"""
