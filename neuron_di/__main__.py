"""`python -m neuron_di`, and the program `neuron-di`."""

import signal
import sys


def main() -> int:
    """Run one command. Returns the exit code.

    Ctrl-C while modules are loaded ends the process at once: where that was is nobody's concern.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_heard = handler is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from neuron_di import cli

    if is_heard:
        signal.signal(signal.SIGINT, handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
