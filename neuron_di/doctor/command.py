"""`neuron-di doctor`: what it does with its flags."""

import argparse
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from neuron_di.clock import now_s
from neuron_di.config import DoctorOptions, load_options, refused_variables
from neuron_di.doctor.checks import Check, chosen
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.report import Doing, FindingPrinter, Report
from neuron_di.doctor.runner import run_check
from neuron_di.errors import ConfigError
from neuron_di.stop_signals import raising_on


@raising_on(signal.SIGTERM, signal.SIGHUP)
def run(flags: argparse.Namespace) -> int:
    """Returns the exit code: 1 when something failed. Raises ConfigError.

    SystemExit on SIGTERM and SIGHUP, with what a shell makes of that signal.
    """
    machine = Machine()
    options = read_options(flags, machine.environment)
    checks = chosen(options)
    if flags.first_hour is not None:
        _refuse_beside_first_hour(flags, options)
        from neuron_di.doctor.first_hour import write_report

        return write_report(machine, options, Path(flags.first_hour))
    start_s = now_s()
    findings: list[Finding] = []
    printer = None if flags.json else FindingPrinter()
    with Doing() as doing:
        for check in checks:
            findings += _examine(check, machine, options, doing, printer)
    report = Report.of(findings, now_s() - start_s)
    if printer is None:
        sys.stdout.write(report.json() + "\n")
    else:
        printer.show_summary(report)
    return 0 if report.is_well else 1


def read_options(flags: argparse.Namespace, environment: Mapping[str, str]) -> DoctorOptions:
    """As for any other command, but for variables that a server would refuse: these are left out.

    The check `environment` tells of them. ConfigError for wrong flags, and a wrong file.
    """
    refused = refused_variables(environment)
    kept = {name: value for name, value in environment.items() if name not in refused}
    return load_options(DoctorOptions, flags, kept, flags.config)


def _refuse_beside_first_hour(flags: argparse.Namespace, options: DoctorOptions) -> None:
    """ConfigError for what would change nothing: it asks its own questions, and has its report."""
    if options.only:
        raise ConfigError(
            "--first-hour asks its own questions, and takes no --only: leave one of them out",
            param="only",
        )
    if flags.json:
        raise ConfigError(
            "--first-hour writes its JSON into its report, and takes no --json: leave one of them "
            "out",
            param="json",
        )


def _examine(
    check: Check,
    machine: Machine,
    options: DoctorOptions,
    doing: Doing,
    printer: FindingPrinter | None,
) -> list[Finding]:
    findings = []
    doing.show(f"checking {check.group}")
    for finding in run_check(check, machine, options):
        findings.append(finding)
        if printer is not None:
            doing.clear()
            printer.show(finding)
            doing.show(f"checking {check.group}")
    return findings
