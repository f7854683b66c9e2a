"""Requests, transfers and random schedules for the tests of the schedulers."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_kit import KvMemory

from neuron_di.core import BlockPool, PrefixCache
from neuron_di.errors import CapacityError, LocalProtocolError, NeuronDiError, Preempted, TooLarge
from neuron_di.request import Request, RequestStatus
from neuron_di.types import RequestId
from neuron_di.wire import SamplingParams

WAITING, RUNNING = RequestStatus.WAITING, RequestStatus.RUNNING
TRANSFERRING, FINISHED = RequestStatus.TRANSFERRING, RequestStatus.FINISHED

# Random schedules of each of the three schedulers, others in each run. `make schedules` tries more.
NUM_SCHEDULES = int(os.environ.get("SCHEDULES", "1000"))
RANDOM_SCHEDULES = settings(
    max_examples=NUM_SCHEDULES,
    stateful_step_count=20,
    deadline=None,
    database=None,
    print_blob=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

# A prompt's ids: one, where another begins; and its scope. So some begin alike, and some are alike
# in the middle only.
IDS = st.sampled_from(
    [(first, border, scope) for first in (1, 2) for border in range(13) for scope in ("", "b")]
)
# (num_prompt, tokens to come at most, num_given, the smaller the older, its ids)
ARRIVAL = st.tuples(
    st.integers(1, 12), st.integers(1, 24), st.integers(0, 6), st.integers(0, 3), IDS
)


def make_request(
    name: object,
    *,
    num_prompt: int = 0,
    max_tokens: int = 4,
    num_given: int = 0,
    age: float = 0,
    prompt_ids: Sequence[int] | None = None,
    scope: str = "",
) -> Request:
    """A request as prefill adds it: new, or continued behind the tokens that are given."""
    ids = [7] * num_prompt if prompt_ids is None else list(prompt_ids)
    return _make(name, ids, max_tokens, num_given, len(ids) + num_given, age, scope)


def make_received(
    name: object, *, num_prompt: int, max_tokens: int = 4, num_given: int = 1, age: float = 0
) -> Request:
    """A request as a decode worker adds it: its newest token is known, but has no KV."""
    num_prefilled = num_prompt + num_given - 1
    return _make(name, [7] * num_prompt, max_tokens, num_given, num_prefilled, age)


def _make(
    name: object,
    prompt_ids: list[int],
    max_tokens: int,
    num_given: int,
    num_prefilled: int,
    age: float,
    scope: str = "",
) -> Request:
    request = Request(
        RequestId(str(name)),
        0,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        output=cast("Any", None),  # schedulers never look at text
        given=[7] * num_given,
        num_prefilled=num_prefilled,
        age_order=age,
        cache_scope=scope,
    )
    request.generated += request.given  # as the engine does
    return request


class Transfer:
    """A transfer whose end the test decides. A CompletionToken."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.block_ids = list(request.block_ids)
        self.is_ended = False
        self.failure: NeuronDiError | None = None

    def is_done(self) -> bool:
        return self.is_ended

    def error(self) -> NeuronDiError | None:
        return self.failure

    def end(self, failure: NeuronDiError | None = None) -> None:
        self.is_ended = True
        self.failure = failure


class SchedulerMachine(RuleBasedStateMachine):
    """What holds for every scheduler: requests come and go at random, the rules are checked.

    It looks at the requests and the pool, not into the scheduler, so that it is a second opinion
    beside the scheduler's own `check_integrity`.
    """

    moves: ClassVar[set[tuple[RequestStatus, RequestStatus]]]
    num_schedules = 0  # of each subclass, counted by its own attribute
    num_reused = 0  # pieces of prompts that were found, of each subclass

    def __init__(self) -> None:
        super().__init__()
        type(self).num_schedules += 1
        self.requests: list[Request] = []  # all that were added, in the order of their starts
        self.statuses: dict[Request, RequestStatus] = {}
        self.transfers: list[Transfer] = []  # that have not ended
        self.quarantine: list[Transfer] = []  # whose requests left before they ended
        self.preempted: list[Request] = []  # that have not come again

    def make_scheduler(self, chunk_tokens: int, waiting_max: int, prefixes: PrefixCache | None):
        raise NotImplementedError

    def num_at_start(self, request: Request) -> int:
        """Token positions a request has blocks for when it starts."""
        return min(request.num_prefilled + self.reserve_tokens, request.num_kv_at_most)

    def num_at_most(self, request: Request) -> int:
        """Token positions it can ever have blocks for."""
        return request.num_kv_at_most

    def new_request(
        self,
        num_prompt: int,
        num_more: int,
        num_given: int,
        age: int,
        ids: tuple[int, int, str],
    ) -> Request:
        first, border, scope = ids
        return make_request(
            len(self.requests),
            prompt_ids=([first] * border + [3] * num_prompt)[:num_prompt],
            scope=scope,
            max_tokens=num_given + num_more,
            num_given=num_given,
            age=age,
        )

    def give_up(self, request: Request, is_held: bool) -> None:
        """Cancel a request. `is_held`: a peer may use its blocks on, where there is one."""
        self.scheduler.finish(request, "cancelled")

    def step(self) -> None:
        """What an engine does in one step, when all goes well."""
        raise NotImplementedError

    def end_transfers(self) -> None:
        """All that others have to do, so that requests can go on."""

    @initialize(
        num_blocks=st.integers(9, 24),
        block_size=st.integers(1, 4),
        batch_size=st.integers(1, 6),
        chunk_tokens=st.integers(1, 9)
        | st.sampled_from([1, 2, 4]),  # of small pieces more are found
        waiting_max=st.integers(2, 6),
        reserve_tokens=st.integers(1, 4),
        keeps_prefixes=st.booleans(),
        arrivals=st.lists(ARRIVAL, min_size=2, max_size=6),
    )
    def start(
        self,
        num_blocks,
        block_size,
        batch_size,
        chunk_tokens,
        waiting_max,
        reserve_tokens,
        keeps_prefixes,
        arrivals,
    ):
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.batch_size = batch_size
        self.chunk_tokens = chunk_tokens
        self.waiting_max = waiting_max
        self.reserve_tokens = reserve_tokens
        self.arrivals: dict[Request, tuple] = {}
        self.prefixes = None
        if keeps_prefixes:
            sizes = {"block_size": block_size, "chunk_tokens": chunk_tokens}
            self.prefixes = PrefixCache(self.pool, **sizes)
        self.kv = KvMemory(self.pool, block_size, chunk_tokens, self.prefixes)
        self.scheduler = self.make_scheduler(chunk_tokens, waiting_max, self.prefixes)
        for arrival in arrivals:
            self.add(arrival)

    def of(self, *statuses: RequestStatus) -> list[Request]:
        return [request for request in self.requests if request.status in statuses]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_kept(self) -> int:
        """Blocks that stay free, so that all who were started can grow once more."""
        step = self.num_blocks_for(self.reserve_tokens)
        return sum(
            min(step, self.num_blocks_for(self.num_at_most(request)) - len(request.block_ids))
            for request in self.of(RUNNING, TRANSFERRING)
        )

    def is_head_stuck(self) -> bool:
        """True when nobody waits, or the first finds no room in the pool when it is polled."""
        waiting = self.of(WAITING)
        if not waiting:
            return True
        num_late = sum(len(t.block_ids) for t in self.quarantine if t.is_ended)
        wanted = self.num_blocks_for(self.num_at_start(waiting[0])) + self.num_kept()
        return wanted > self.pool.num_free + num_late

    def is_full(self, request: Request) -> bool:
        return request.num_computed >= len(request.block_ids) * self.block_size

    def let_go(self, failures) -> None:
        """As the engine does. Those that were preempted come again as soon as there is a place."""
        running, num_free = self.of(RUNNING), self.pool.num_free
        going = [request for request, error in failures if isinstance(error, Preempted)]
        if going:
            assert sum(map(self.is_full, running)) > num_free
            assert len(going) < len(running)
            by_age = sorted(self.order_of_start(running), key=lambda request: request.age_order)
            assert by_age[-len(going) :] == going
        for request, _ in failures:
            self.scheduler.finish(request, "error")
        self.preempted += going

    def order_of_start(self, running: list[Request]) -> list[Request]:
        return running

    def come_again(self) -> None:
        while self.preempted and len(self.of(WAITING)) < self.waiting_max:
            request = self.preempted.pop(0)
            num_given = len(request.generated)
            num_more = request.max_tokens - num_given
            ids = self.arrivals[request][4]
            self.add((request.num_prompt, num_more, num_given, request.age_order, ids))

    @rule(arrival=ARRIVAL)
    def add(self, arrival):
        request = self.new_request(*arrival)
        self.arrivals[request] = arrival
        num_waiting = len(self.of(WAITING))
        try:
            self.scheduler.add(request)
        except TooLarge:
            assert self.num_blocks_for(self.num_at_most(request)) > self.pool.num_blocks
        except CapacityError:
            assert num_waiting == self.waiting_max
        else:
            assert self.num_blocks_for(self.num_at_most(request)) <= self.pool.num_blocks
            assert num_waiting < self.waiting_max
            self.requests.insert(self.place_of(request), request)
            self.statuses[request] = WAITING

    def place_of(self, request: Request) -> int:
        """Before all who wait and are younger."""
        for place, other in enumerate(self.requests):
            if other.status is WAITING and other.age_order > request.age_order:
                return place
        return len(self.requests)

    @rule(num_steps=st.integers(1, 8), others_keep_up=st.booleans())
    def run_steps(self, num_steps, others_keep_up):
        for _ in range(num_steps):
            self.step()
            self.check_all()
            if others_keep_up:
                self.end_transfers()

    @precondition(lambda self: self.of(WAITING, RUNNING, TRANSFERRING))
    @rule(index=st.integers(0, 9), is_held=st.booleans())
    def cancel(self, index, is_held):
        live = self.of(WAITING, RUNNING, TRANSFERRING)
        request = live[index % len(live)]
        self.quarantine += [t for t in self.transfers if t.request is request]
        self.give_up(request, is_held)
        assert request.finish_reason == "cancelled"

    @precondition(lambda self: self.of(FINISHED))
    @rule(index=st.integers(0, 9))
    def finish_again(self, index):
        finished = self.of(FINISHED)
        request = finished[index % len(finished)]
        with pytest.raises(LocalProtocolError):
            self.scheduler.finish(request, "error")

    @invariant()
    def check_all(self):
        self.only_legal_moves()
        self.first_come_first_served()
        self.blocks_add_up()
        self.limits_hold()
        self.kv.check_kept()

    def only_legal_moves(self):
        for request in self.requests:
            move = self.statuses[request], request.status
            assert move[0] is move[1] or move[1] is FINISHED or move in self.moves, move
            assert move[0] is not FINISHED or move[1] is FINISHED
            self.statuses[request] = request.status

    def first_come_first_served(self):
        waiting = [i for i, request in enumerate(self.requests) if request.status is WAITING]
        started = [i for i, request in enumerate(self.requests) if request.block_ids]
        assert not waiting or not started or started[-1] < waiting[0]

    def blocks_add_up(self):
        owned = []
        for request in self.requests:
            if request.status in (RUNNING, TRANSFERRING):
                least = self.num_blocks_for(self.num_at_start(request))
                most = self.num_blocks_for(self.num_at_most(request))
                assert least <= len(request.block_ids) <= most
                owned += request.block_ids
            else:
                assert request.block_ids == []
        for transfer in self.quarantine:
            if not transfer.is_ended:
                owned += transfer.block_ids
        assert len(owned) == len(set(owned))
        # Those of an ended transfer come back when the scheduler polls next.
        num_late = sum(len(t.block_ids) for t in self.quarantine if t.is_ended)
        num_not_owned = self.pool.num_blocks - len(owned)
        assert num_not_owned - num_late <= self.pool.num_free <= num_not_owned
        self.count_agrees()

    def count_agrees(self):
        def held_by(*statuses):
            return sum(len(request.block_ids) for request in self.of(*statuses))

        count = self.scheduler.count_blocks()
        count.check()
        kept = [] if self.prefixes is None else self.prefixes.owned()
        assert count.cached == sum(map(len, kept))
        assert (count.total, count.free) == (
            self.pool.num_blocks,
            self.pool.num_free - count.cached,
        )
        assert count.running == held_by(RUNNING)
        assert count.parked + count.receiving == held_by(TRANSFERRING)
        in_use = sum(len(t.block_ids) for t in self.quarantine if not t.is_ended)
        assert in_use <= count.quarantined <= sum(len(t.block_ids) for t in self.quarantine)

    def limits_hold(self):
        assert len(self.of(RUNNING, TRANSFERRING)) <= self.batch_size
        assert len(self.of(WAITING)) <= self.waiting_max
        scheduler = self.scheduler
        counts = scheduler.num_waiting, scheduler.num_running, scheduler.num_transferring
        assert counts == tuple(len(self.of(s)) for s in (WAITING, RUNNING, TRANSFERRING))
        scheduler.check_integrity()

    def teardown(self):
        """Nobody starves: when all goes well from here on, every request ends."""
        if not hasattr(self, "scheduler"):
            return
        steps_max = 400 * len(self.requests)
        while not self.scheduler.is_idle() or self.preempted:
            steps_max -= 1
            assert steps_max > 0, "somebody starves"
            self.end_transfers()
            self.come_again()
            self.step()
            self.check_all()
        assert self.of(WAITING, RUNNING, TRANSFERRING) == []
        assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(self.pool.num_blocks))
        assert self.prefixes is None or not list(self.prefixes.owned())
        type(self).num_reused += self.kv.num_reused
