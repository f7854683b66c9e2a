"""Workers of memory that say by a link how they are, beside being asked. On virtual time."""

import asyncio
from contextlib import asynccontextmanager

from scripted_worker import make_status
from virtual_cluster import one_by_one

from neuron_di.clock import now_s
from neuron_di.wire.leg_link import ALIVE_INTERVAL_S


class Losses(list):
    """What a leg was told, and when."""

    def __call__(self, error):
        self.append((type(error), now_s()))


def states(cluster):
    return {r.record.worker_id: r.state for r in cluster.health.reports()}


def word_of(worker, **says):
    return make_status(worker.record, **(worker.says | says))


class Link:
    """A worker's link to the proxy: a word each second while the worker runs."""

    def __init__(self, cluster, worker):
        self.health, self.worker = cluster.health, worker
        self.record = worker.record  # of the process that the link was made to
        self.is_silent = False  # although the worker runs
        self.num_words = 0
        self._task = asyncio.create_task(self._talk())

    def say(self, **says):
        self.num_words += 1
        self.health.note_word(self.record, word_of(self.worker, **says))

    def end(self):
        self._task.cancel()
        self.health.note_word(self.record, None)

    async def _talk(self):
        while not self.worker.is_gone:
            if self.worker.thawed.is_set() and not self.is_silent:
                self.say()
            await asyncio.sleep(ALIVE_INTERVAL_S)


@asynccontextmanager
async def talking(worker_id="d1", **limits):
    """A cluster, a worker of it that talks, its link, and the losses of a leg there."""
    async with one_by_one(**limits) as cluster:
        worker, lost = cluster.workers[worker_id], Losses()
        with cluster.health.watching(worker.record, lost):
            await asyncio.sleep(0.1)
            link = Link(cluster, worker)
            try:
                yield cluster, worker, link, lost
            finally:
                link._task.cancel()
