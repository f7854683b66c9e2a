"""`neuron-di doctor`: its flags. Light: they are declared whatever the command.

Next: neuron_di/doctor/command.py
"""

import argparse

from neuron_di.config import DoctorOptions, add_flags
from neuron_di.doctor.checks import GROUPS

_EPILOG = (
    f"Groups of checks: {', '.join(GROUPS)}. Flags that a server has too mean the same here, and "
    "so do its variables and its file: give the doctor those that the server will get; --json and "
    "--first-hour are flags alone. Exit codes: "
    "0 nothing failed, 1 something failed, 2 wrong flags."
)


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    add_flags(parser, DoctorOptions)
    parser.epilog = f"{_EPILOG} {parser.epilog or ''}"
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--first-hour",
        metavar="FILE",
        help="instead: try on this machine's Neuron devices what has never run on hardware, and "
        "write a report to this file that can be sent",
    )


def run_doctor_command(flags: argparse.Namespace) -> int:
    """Do what the flags say. Returns the exit code: 1 when something failed. Raises ConfigError."""
    from neuron_di.doctor.command import run

    return run(flags)
