"""The commands and examples of README.md and docs/ run as they are written.

`pages` finds them: indented lines, and fenced blocks of `sh`, `text` (after `$ `) and `python`. `desk` is a folder
with the files, models, server and hub that they name. `test_commands` runs them, page by page, and says which cannot
run. A new command is found by itself.
"""
