"""A run: find the endpoints, draw the requests, send them, in turns where there are several.

Slices of the same requests take turns, A B B A A B …, so that what changes on the machine or the
network over time meets all endpoints alike. One endpoint rests while another one works.

Next: neuron_di/bench/load.py, neuron_di/bench/client.py, neuron_di/bench/summary.py
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from neuron_di.bench.client import Heard
from neuron_di.bench.endpoint import Endpoint, find_endpoint
from neuron_di.bench.load import Load, note_in
from neuron_di.bench.measured import Measured, Outcome
from neuron_di.bench.outcome import read_outcome
from neuron_di.bench.plan import Plan, make_plan
from neuron_di.bench.settings import Settings
from neuron_di.bench.traces import Trace
from neuron_di.clock import now_s, process_cpu_s, unix_s
from neuron_di.errors import ConfigError

TICK_S = 0.02  # how often the client looks whether it keeps up


@dataclass(slots=True)
class Strain:
    """How much the client itself had to do: whether its figures can be believed."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    stall_s: float = 0.0  # the longest time in which its event loop answered nobody


@dataclass(frozen=True, slots=True)
class Turn:
    """A slice at an endpoint, from its first request to the end of its last. Times are `now_s`."""

    endpoint: int
    slice_index: int
    begin_s: float
    end_s: float
    most_open: int


@dataclass(slots=True, kw_only=True)
class Run:
    """All that a run has found out so far. It can be summed up at any moment."""

    settings: Settings
    endpoints: list[Endpoint]
    plan: Plan
    measured: list[Measured]
    turns: list[Turn] = field(default_factory=list)
    strain: Strain = field(default_factory=Strain)
    started_unix_s: float = field(default_factory=unix_s)
    is_interrupted: bool = False

    @property
    def num_over(self) -> int:
        return sum(sum(each.counts.values()) for each in self.measured)

    @property
    def num_planned(self) -> int:
        return len(self.plan) * len(self.endpoints)


@dataclass(slots=True)
class View:
    """What progress shows while the run goes on."""

    run: Run | None = None
    words: str = "looking at the endpoints"
    load: Load[Heard] | None = None


async def bench(
    settings: Settings,
    trace: Trace | None,
    key: str | None,
    view: View,
    on_run: Callable[[Run], None] = lambda _: None,
) -> Run:
    """Do all of it. Cancelled, `on_run`'s run has what was measured. Raises ConfigError."""
    endpoints: list[Endpoint] = []
    try:
        for place in range(len(settings.urls)):
            found = await find_endpoint(settings, place, key)
            endpoints.append(found)  # one by one: all that were found are closed
        contexts = [each.context_tokens for each in endpoints if each.context_tokens is not None]
        plan = make_plan(settings, trace, min(contexts, default=None))
        run = Run(
            settings=settings,
            endpoints=endpoints,
            plan=plan,
            measured=[Measured() for _ in endpoints],
        )
        view.run = run
        view.words = "warming up"
        for endpoint in endpoints:
            await _warm_up(endpoint, run)
        on_run(run)
        run.started_unix_s = unix_s()
        await _under_watch(run, view)
        return run
    finally:
        for endpoint in endpoints:
            await endpoint.client.close()


def order_of_turns(num_endpoints: int, num_slices: int) -> Iterator[tuple[int, int]]:
    """Pairs of slice and endpoint: A B, then B A, then A B, so that nobody is always first."""
    for slice_index in range(num_slices):
        places = range(num_endpoints)
        for endpoint in places if slice_index % 2 == 0 else reversed(places):
            yield slice_index, endpoint


async def _warm_up(endpoint: Endpoint, run: Run) -> None:
    """Send requests that are not counted. ConfigError when none is answered."""
    num = run.settings.warmup
    if num == 0:
        return
    maker = endpoint.maker(run.settings)
    at_once = asyncio.Semaphore(run.settings.concurrency or 4)

    async def one(index: int) -> Outcome:
        num_tokens = int(run.plan.output_tokens[index % len(run.plan)])
        prompt = maker.warm_up(index, int(run.plan.input_tokens[index % len(run.plan)]))
        async with at_once:
            heard = await endpoint.client.send(
                endpoint.request_bytes(prompt, num_tokens), run.settings.timeout_s
            )
        return read_outcome(heard, endpoint.expected(num_tokens))

    outcomes = await asyncio.gather(*(one(index) for index in range(num)))
    if all(outcome.ending != "ok" for outcome in outcomes):
        why = f"{outcomes[0].ending}: {outcomes[0].why}"
        raise ConfigError(f"{endpoint.url} answers none of {num} requests to warm up: {why}")


async def _under_watch(run: Run, view: View) -> None:
    """Take all turns, and notice how the client itself bears it."""
    watching = asyncio.create_task(_watch(run.strain))
    before_s, before_cpu_s = now_s(), process_cpu_s()
    try:
        for slice_index, place in order_of_turns(len(run.endpoints), run.settings.slices):
            await _take_turn(run, view, slice_index, place)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        run.strain.wall_s, run.strain.cpu_s = now_s() - before_s, process_cpu_s() - before_cpu_s


async def _take_turn(run: Run, view: View, slice_index: int, place: int) -> None:
    settings, plan, endpoint = run.settings, run.plan, run.endpoints[place]
    load = Load(
        PlannedTarget(run, endpoint),
        plan.slices(settings.slices)[slice_index],
        note_in(run.measured[place], slice_index, lambda index: int(plan.input_tokens[index])),
        cap=settings.concurrency,
    )
    view.load = load
    view.words = endpoint.name
    if settings.slices > 1:
        view.words += f", slice {slice_index + 1} of {settings.slices}"
    begin_s = now_s()
    try:
        if plan.at_s is not None:
            await load.open_loop(plan.at_s)
        else:
            assert settings.concurrency is not None
            duration_s = settings.duration_s
            share_s = None if duration_s is None else duration_s / settings.slices
            await load.closed_loop(settings.concurrency, share_s)
    finally:
        end_s = max(begin_s, load.end_s)  # of no request at all: it ends as it begins
        run.turns.append(Turn(place, slice_index, begin_s, end_s, load.most_open))
        view.load = None


class PlannedTarget:
    """An endpoint, asked what is planned."""

    def __init__(self, run: Run, endpoint: Endpoint) -> None:
        self._plan = run.plan
        self._timeout_s = run.settings.timeout_s
        self._endpoint = endpoint
        self._maker = endpoint.maker(run.settings)

    def make(self, index: int) -> bytes:
        return self._endpoint.nth_request(self._maker, self._plan, index)

    async def send(self, request: bytes) -> Heard:
        return await self._endpoint.client.send(request, self._timeout_s)

    def read(self, index: int, answer: Heard) -> Outcome:
        return read_outcome(answer, self._endpoint.expected(int(self._plan.output_tokens[index])))


async def _watch(strain: Strain) -> None:
    """Notice how late a timer is: so long nobody's answer was looked at."""
    while True:
        due_s = now_s() + TICK_S
        await asyncio.sleep(TICK_S)
        strain.stall_s = max(strain.stall_s, now_s() - due_s)


def turns_of(turns: Sequence[Turn], endpoint: int) -> list[Turn]:
    return [turn for turn in turns if turn.endpoint == endpoint]
