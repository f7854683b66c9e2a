"""Everything about --device cuda that only a GPU can show, run by one command.

    python -m benchmarks.device_check --out FOLDER

Runs with a machine's own Python: the command itself needs the standard library only, and a part
that needs more says what is missing. See benchmarks/README.md.
"""
