"""The commands: one module does the work of each, imported when the command is asked for."""
