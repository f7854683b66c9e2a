"""A cluster that changes under load, or whose etcd fails: python -m dynamic [--faults etcd]

Prints a line per event and ends with 1 when a request failed, a token was wrong, something was left
behind, or a worker got requests when it should not, or none when it should.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from chaos.cluster import Settings
from etcd.etcd_kit import running_etcd

from benchmarks.provenance import machine_description
from neuron_di.clock import unix_s

from . import etcd_faults, scenario
from .cluster import Cluster
from .etcd_faults import FAULTS, EtcdFault, befall, etcd_for
from .events import Stage
from .findings import Findings
from .load import Wanted
from .report import table
from .run import run_under_load, running_cluster
from .settings import DEFAULTS, KEY_TIMEOUT_S, LEAK_TIMEOUT_S, QUICK

RATE_PER_S = 8.0
SECONDS = 60.0
CALM_S = 2.5


async def run_changes(folder: Path, flags: argparse.Namespace) -> bool:
    """Workers come, go, die, stand still and change their role. True: no violation."""

    async def play(stage: Stage) -> None:
        await scenario.one_by_one(stage, CALM_S)

    async with (
        running_etcd() as etcd,
        running_cluster(etcd, scenario.FIRST, DEFAULTS, folder, num_proxies=2) as cluster,
    ):
        wanted = await Wanted.learn(cluster.urls[0])
        start_s = unix_s()
        found = await run_under_load(
            cluster,
            wanted,
            play,
            rate_per_s=flags.rate,
            leak_timeout_s=LEAK_TIMEOUT_S,
            lasts_s=flags.seconds,
        )
        await _end(cluster, found)
    _print("Workers come, go, fail and change", found, start_s)
    return not found.flaws


async def run_faults(folder: Path, flags: argparse.Namespace, faults: list[EtcdFault]) -> bool:
    """One fault of etcd after another, on a cluster of their own kind. True: no violation."""
    is_good = True
    for has_users in (False, True):
        chosen = [fault for fault in faults if fault.has_users == has_users]
        if not chosen:
            continue
        settings = Settings(worker={"etcd_ttl_s": QUICK.worker["etcd_ttl_s"]})
        async with (
            etcd_for(has_users=has_users) as etcd,
            running_cluster(etcd, etcd_faults.FIRST, settings, folder, num_proxies=2) as cluster,
        ):
            wanted = await Wanted.learn(cluster.urls[0])
            for fault in chosen:
                start_s = unix_s()
                found = await run_under_load(
                    cluster,
                    wanted,
                    partial(befall, fault=fault),
                    rate_per_s=flags.rate,
                    leak_timeout_s=LEAK_TIMEOUT_S,
                )
                if fault is chosen[-1]:
                    await _end(cluster, found)
                _print(f"etcd: {fault.title}", found, start_s)
                is_good = is_good and not found.flaws
    return is_good


async def _end(cluster: Cluster, found: Findings) -> None:
    found.flaws += await cluster.end(KEY_TIMEOUT_S)


def _print(title: str, found: Findings, start_s: float) -> None:
    sys.stdout.write("\n".join([*table(f"## {title}", found, start_s), "", ""]))
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dynamic", description=__doc__)
    parser.add_argument(
        "--faults", nargs="+", choices=["etcd", *FAULTS], help="faults of etcd; etcd is all of them"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of load")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests per second")
    flags = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.write(f"On {machine_description()}; {flags.rate:g} requests/s.\n\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if flags.faults:
            faults = FAULTS.values() if "etcd" in flags.faults else map(FAULTS.get, flags.faults)
            is_good = asyncio.run(run_faults(folder, flags, [f for f in faults if f is not None]))
        else:
            is_good = asyncio.run(run_changes(folder, flags))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
