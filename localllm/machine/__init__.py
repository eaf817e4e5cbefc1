"""Facts about this computer that Python does not tell: its processor, its memory, the energy it uses.

Each fact comes from the system's own place for it, with one row per system in a table. `system.py` makes the calls.
"""
