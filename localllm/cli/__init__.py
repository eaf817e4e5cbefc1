"""The command line: `main.py` holds the table of commands; `commands` does the work, `terminal` prints.

Nothing here is imported by the rest of the program. Only `main.main` turns errors into a line and an exit code.
"""
