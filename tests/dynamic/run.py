"""Runs something under load and says what it came to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.cluster import Settings
from etcd.etcd_kit import Etcd

from neuron_di.clock import now_s
from neuron_di.types import Role

from .cluster import Cluster
from .events import Stage
from .findings import Findings, find
from .load import Load, Wanted

MODEL = Path(__file__).parents[2] / "examples/models/tiny-tales"
NUM_BEFORE = NUM_AFTER = 8  # requests without any disturbance

Play = Callable[[Stage], Awaitable[None]]


@asynccontextmanager
async def running_cluster(
    etcd: Etcd,
    first: Iterable[tuple[str, Role]],
    settings: Settings,
    folder: Path,
    *,
    num_proxies: int = 1,
) -> AsyncIterator[Cluster]:
    """A cluster whose first workers every proxy knows."""
    async with Cluster(etcd, MODEL, settings, folder, num_proxies=num_proxies) as cluster:
        await asyncio.gather(*(cluster.join(name, role) for name, role in first))
        await cluster.settled()
        yield cluster


async def run_under_load(
    cluster: Cluster,
    wanted: Wanted,
    play: Play,
    *,
    rate_per_s: float,
    leak_timeout_s: float,
    lasts_s: float = 0.0,
) -> Findings:
    """Let it happen while requests run, for so long at least. All violations are findings."""
    stage = Stage(cluster)
    broken: list[str] = []
    end_s = now_s() + lasts_s
    async with Load(cluster, wanted, rate_per_s=rate_per_s) as load:
        await load.more(NUM_BEFORE)
        try:
            await play(stage)
            await cluster.settled()
            await asyncio.sleep(max(0.0, end_s - now_s()))
            await load.more(NUM_AFTER)
            await cluster.settled()  # it stays so
        except RuntimeError as error:  # an order or an agreement; everything else is a bug here
            broken.append(str(error))
            cluster.calm()
    found = find(load.asked, stage.events, cluster.proxies)
    found.flaws += broken
    found.flaws += [f"leaked: {words}" for words in await cluster.leaks(leak_timeout_s)]
    found.flaws += [f"logged: {words}" for words in cluster.complaints()]
    return found
