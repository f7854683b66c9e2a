"""`neuron-di role WORKER ROLE`: another role at run time, and the proof that it did switch."""

import argparse

from neuron_di.drain_command import add_order_flags

SUMMARY = "change a worker's role while it runs, and check that it switched"


def add_role_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those that say where the proxy is."""
    parser.usage = "%(prog)s WORKER ROLE [flags]"
    parser.add_argument("worker", metavar="WORKER", help="its name, as `neuron-di status` shows it")
    parser.add_argument("role", choices=("prefill", "decode", "both"), help="what it is to do")
    add_order_flags(parser)


def run_role_command(flags: argparse.Namespace, key: str | None) -> int:
    """Returns the exit code: 1 when it did not switch, or a request failed or was cut."""
    from neuron_di.admin_orders import give_order
    from neuron_di.order_terminal import show_order

    order = {
        "worker": flags.worker,
        "role": flags.role,
        "timeout_s": flags.timeout_s,
        "force": flags.force,
    }
    return show_order(flags.worker, give_order(flags.url, "/admin/role", order, key), "role")
