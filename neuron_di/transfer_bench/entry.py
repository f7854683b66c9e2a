"""What others call. Nothing heavy is loaded before it is needed."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuron_di.transfer_bench.flags import AUTO

if TYPE_CHECKING:
    from neuron_di.transfer_bench.report import TransferReport


def run_bench_transfer(flags: argparse.Namespace) -> int:
    """Do what the command's flags say. Returns the exit code. Raises NeuronDiError."""
    from neuron_di.transfer_bench.command import run

    return run(flags)


def measure_transfers(
    engines: Sequence[str] = (AUTO,),
    shapes: Sequence[str] = ("64KiB", "64MiB"),
    *,
    repeats: int = 5,
    verify: bool = True,
    pool_bytes: int = 128 << 20,
) -> "TransferReport":
    """Measure between this process and a second one of this host. Blocks, some seconds.

    Each end has a pool of at least `pool_bytes`, and so have both regions that memcpy uses.
    An engine that does not work is among the report's failures, with its error's code and words.
    Raises ConfigError for what cannot be asked for, PeerError where the other process does not run.
    """
    from neuron_di.transfer_bench.measure import measure_on_this_host

    return measure_on_this_host(
        engines, shapes, repeats=repeats, verify=verify, pool_bytes=pool_bytes
    )
