"""Shared by all packages: errors, notices that name options, printable text, units, files, facts about the machine.

May import: the standard library only.
Begin with: notices.py, then files/regular.py (reading) and files/outputs.py (writing).
"""
