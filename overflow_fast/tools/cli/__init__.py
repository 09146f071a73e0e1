"""The command line: each command is a file `NAME_command.py`."""
