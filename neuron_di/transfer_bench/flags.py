"""The flags of `neuron-di bench-transfer`. Light: they are declared whatever the command."""

import argparse

KEY_VARIABLE = "KEY_NEURON_DI_TRANSFER"  # whoever can list processes can read flags
READY_WORDS = "bench-transfer listens on"
AUTO = "auto"
ENGINES = (AUTO, "handover", "cuda_ipc", "shm", "nixl", "tcp")

NIXL_BACKENDS = ("UCX", "LIBFABRIC")
OF_WORKERS = (  # by the names that workers have for them
    ("transfer-streams", "N", "tcp: connections that large transfers are spread over (default: 2)"),
    ("transfer-tls-cert", "FILE", "tcp: certificate chain for TLS, shown by both ends"),
    ("transfer-tls-key", "FILE", "tcp: its private key"),
    ("transfer-tls-ca", "FILE", "tcp: certificates that sign those of the other end"),
    ("nixl-backend", None, "nixl: what moves KV beneath it, such as LIBFABRIC for EFA on AWS"),
)
_EPILOG = (
    "On one host: --engine and --shape. Between two: --serve at one end, which prints a key for "
    f"one run, and --connect at the other, which takes it from --key-file or {KEY_VARIABLE}. "
    "Exit codes: 0 measured, 1 an engine does not work, 2 the run could not start."
)


def add_bench_transfer_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.usage = "%(prog)s [--serve | --connect HOST:PORT] [flags]"
    parser.epilog = _EPILOG.replace("%", "%%")
    ends = parser.add_argument_group("ends").add_mutually_exclusive_group()
    ends.add_argument("--serve", action="store_true", help="be the end that is read from")
    ends.add_argument("--connect", metavar="HOST:PORT", help="measure against such an end")
    more = parser.add_argument_group("two hosts")
    more.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of this end; not loopback: others reach it (default: %(default)s)",
    )
    more.add_argument(
        "--port", type=int, default=0, metavar="N", help="to listen on (default: a free one)"
    )
    more.add_argument("--key-file", metavar="FILE", help="holds the key, at either end")
    more.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    as_workers = parser.add_argument_group("as for workers, at either end")
    for name, metavar, words in OF_WORKERS:
        kind = int if metavar == "N" else str
        choices = None if metavar else NIXL_BACKENDS
        as_workers.add_argument(
            f"--{name}", type=kind, metavar=metavar, choices=choices, help=words
        )
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--engine",
        action="append",
        dest="engines",
        choices=ENGINES,
        help="repeatable: they take turns. auto: what a pair of workers would choose (default)",
    )
    what.add_argument(
        "--shape",
        action="append",
        dest="shapes",
        metavar="[Nx]SIZE",
        help="as 1GiB, or 4096x16KiB: this many blocks at random places; repeatable "
        "(default: 64KiB, 64MiB, 4096x16KiB)",
    )
    what.add_argument(
        "--repeats", type=int, metavar="N", help="transfers of each shape (default: 20)"
    )
    what.add_argument(
        "--pool-mib",
        type=int,
        metavar="N",
        help="memory of each end, at least (default: twice the largest cache, or what there is)",
    )
    what.add_argument(
        "--verify", action="store_true", help="compare every byte; else only a first transfer's"
    )
    what.add_argument("--json", action="store_true", help="print the figures as JSON")
