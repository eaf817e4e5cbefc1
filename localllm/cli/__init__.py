"""The command line: `main.py` holds the table of commands; one module does the work of each, imported when asked for.

Nothing here is imported by the rest of the program. Only `main.main` turns errors into a line and an exit code.
"""
