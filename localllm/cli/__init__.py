"""The command line. Only `main.main` turns an error into a message and an exit code.

May import: all rooms below.
Begin with: main.py, table.py (the commands), then starting.py; commands/ does the work, terminal/ prints.
"""
