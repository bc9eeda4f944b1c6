"""The commands of `llava-consensus`, a file for each group: their arguments, and the lines they print.

Every command is a generator of lines; `cli.py` prints them and turns errors into exit codes. Nothing heavy is imported
before a command runs.
"""
