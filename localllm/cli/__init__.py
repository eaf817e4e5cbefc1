"""The command line: `main.py` runs it, `table.py` lists the commands, `commands` does the work, `terminal` prints.

The rest of the program imports nothing from here. Only `main.main` turns errors into a line and an exit code.
"""
