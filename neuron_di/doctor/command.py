"""`neuron-di doctor`: what it does with its flags."""

import argparse
import sys
from pathlib import Path

from neuron_di.clock import now_s
from neuron_di.doctor.checks import Check, chosen
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.options import DoctorOptions, read_options
from neuron_di.doctor.report import Doing, FindingPrinter, Report
from neuron_di.doctor.runner import run_check


def run(flags: argparse.Namespace) -> int:
    """Returns the exit code: 1 when something failed. Raises ConfigError."""
    machine = Machine()
    options = read_options(flags, machine.environment)
    checks = chosen(options)
    if flags.first_hour is not None:
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
