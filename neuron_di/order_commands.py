"""`neuron-di drain WORKER`: no new requests, running ones finish, then it is gone; `neuron-di role
WORKER ROLE`: another role at run time, and the proof that it did switch."""

import argparse

from neuron_di.wire.admin import WAIT_S_MAX


def add_drain_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those that say where the proxy is."""
    parser.usage = "%(prog)s WORKER [flags]"
    parser.add_argument("worker", metavar="WORKER", help="its name, as `neuron-di status` shows it")
    _add_order_flags(parser)


def add_role_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those that say where the proxy is."""
    parser.usage = "%(prog)s WORKER ROLE [flags]"
    parser.add_argument("worker", metavar="WORKER", help="its name, as `neuron-di status` shows it")
    parser.add_argument("role", choices=("prefill", "decode", "both"), help="what it is to do")
    _add_order_flags(parser)


def _add_order_flags(parser: argparse.ArgumentParser) -> None:
    """What all orders have."""
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=None,
        metavar="SECONDS",
        help="seconds that running requests get to finish; what runs longer is cut here and goes "
        "on with other workers (default: the worker's own --drain-timeout-s)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also where no other worker of its role would be left for its model",
    )


def seconds(text: str) -> float:
    """A length of time, a day at most; argparse tells a ValueError as "invalid seconds value"."""
    length_s = float(text)
    if not 0 <= length_s <= WAIT_S_MAX:  # NaN neither
        raise ValueError
    return length_s


def run_drain_command(flags: argparse.Namespace, key: str | None) -> int:
    """Returns the exit code: 1 when a request failed or was cut, or its end could not be seen."""
    from neuron_di.admin_orders import give_order
    from neuron_di.order_terminal import show_order

    order = {"worker": flags.worker, "timeout_s": flags.timeout_s, "force": flags.force}
    return show_order(flags.worker, give_order(flags.url, "/admin/drain", order, key))


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
