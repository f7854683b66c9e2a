"""Recovery, health and self test over workers of memory, on virtual time: hours take no time."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec
from running_proxy import ListDirectory
from scripted_worker import finished, make_record, make_status, parked, released, token

from neuron_di.clock import now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import NeuronDiError, PeerGone, PeerTimeout
from neuron_di.types import Incarnation, RequestId
from neuron_di.wire import (
    Failed,
    Finished,
    PrefillLeg,
    Released,
    SamplingParams,
    Token,
    WorkerRecord,
    WorkerStatus,
)
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.health import Health
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.recovery import RequestRunner
from neuron_di_proxy.route import Router
from neuron_di_proxy.self_test import PairBook, SelfTest
from neuron_di_proxy.workers import Hear

_ports = itertools.count(20_000)
TOKEN_S = 0.01  # virtual seconds that a worker needs for one
NUM_TOKENS = 8
REQUEST = ChoiceRequest(
    endpoint="completions",
    model="tiny",
    prompt=msgspec.Raw(b'"hi"'),
    sampling=SamplingParams(max_tokens=NUM_TOKENS),
)


class VirtualLeg:
    """One leg as proxy and worker see it. What is said after its end, or its close, is dropped."""

    def __init__(self, worker: "VirtualWorker", message: Any) -> None:
        self.worker = worker
        self.worker_id = worker.record.worker_id
        self.incarnation = worker.record.incarnation
        self.message = message
        self.is_closed = False
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def first_index(self) -> int:
        message = self.message
        return len(message.emitted) if isinstance(message, PrefillLeg) else message.num_emitted

    def say(self, event: Any) -> None:
        self._said.put_nowait(event)

    def open(self, hear: Hear) -> None:
        if self.worker.is_gone:
            self.say(PeerGone(f"worker {self.worker_id} is gone"))
        else:
            self.worker.legs.append(self)
            self._tasks.append(asyncio.create_task(self._play()))
        self._tasks.append(asyncio.create_task(self._deliver(hear)))

    def close(self) -> None:
        self.is_closed = True
        for task in self._tasks:
            task.cancel()

    async def _play(self) -> None:
        async for event in self.worker.script(self):
            await self.worker.thawed.wait()
            self.say(event)

    async def _deliver(self, hear: Hear) -> None:
        is_over = False
        while not is_over:
            event = await self._said.get()
            await self.worker.thawed.wait()
            is_over = isinstance(event, Exception | Failed | Finished | Released)
            hear(LegFailed(event) if isinstance(event, Failed) else event)


Script = Callable[[VirtualLeg], AsyncGenerator[Any, None]]


async def play(leg: VirtualLeg) -> AsyncGenerator[Any, None]:
    """What a good worker of any role says."""
    role, index = leg.worker.record.role, leg.first_index
    if role != "decode":
        await asyncio.sleep(TOKEN_S)
        yield token(index)
        index += 1
    if role == "prefill":
        yield parked()
        yield released()
        return
    if role == "decode":
        index += 1
    end = leg.message.sampling.max_tokens
    for each in range(index, end):
        await asyncio.sleep(TOKEN_S)
        yield token(each)
    yield finished(end)


def fail_with(error: Any, *, after: int = 0) -> Script:
    """Play that many events, then fail."""

    async def script(leg: VirtualLeg) -> AsyncGenerator[Any, None]:
        async for event in _first(after, leg):
            yield event
        await asyncio.sleep(TOKEN_S)
        yield error

    return script


def silent_after(num_events: int) -> Script:
    """Play that many events, then say nothing for ever. Its connection stays open."""

    async def script(leg: VirtualLeg) -> AsyncGenerator[Any, None]:
        async for event in _first(num_events, leg):
            yield event
        await asyncio.Event().wait()

    return script


def slowly(token_s: float) -> Script:
    """Play, with a pause before each event."""

    async def script(leg: VirtualLeg) -> AsyncGenerator[Any, None]:
        async for event in play(leg):
            await asyncio.sleep(token_s)
            yield event

    return script


async def _first(num_events: int, leg: VirtualLeg) -> AsyncGenerator[Any, None]:
    if num_events == 0:
        return
    async for event in play(leg):
        yield event
        num_events -= 1
        if num_events == 0:
            return


def once(first: Script, then: Script = play) -> Script:
    """`first` for the first leg, `then` for the others."""
    scripts = [first]

    def script(leg: VirtualLeg) -> AsyncGenerator[Any, None]:
        return (scripts.pop() if scripts else then)(leg)

    return script


class VirtualWorker:
    def __init__(self, worker_id: str, role: str, script: Script = play, **record: Any) -> None:
        place = {"api_port": next(_ports)}  # nobody else's
        self.record: WorkerRecord = make_record(worker_id, role, **(place | record))
        self.script = script
        self.legs: list[VirtualLeg] = []
        self.says: dict[str, Any] = {}  # of its status, other than usual
        self.is_gone = False
        self.num_asked = 0
        self.thawed = asyncio.Event()
        self.thawed.set()

    def kill(self) -> None:
        self.is_gone = True
        for leg in self.legs:
            leg.say(PeerGone(f"worker {leg.worker_id} is gone"))

    def freeze(self) -> None:
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    def restart(self) -> None:
        """Another process answers at the same address."""
        self.kill()
        self.is_gone = False
        life = Incarnation(f"{self.record.incarnation}+")
        self.record = msgspec.structs.replace(self.record, incarnation=life)

    async def status(self, timeout_s: float = 1.0) -> WorkerStatus:
        self.num_asked += 1
        await asyncio.sleep(0.001)
        if self.is_gone:
            raise PeerGone(f"worker {self.record.worker_id} is gone")
        try:
            async with asyncio.timeout(timeout_s):
                await self.thawed.wait()
        except TimeoutError:
            raise PeerTimeout(f"worker {self.record.worker_id} did not answer in time") from None
        return make_status(self.record, **self.says)


class Asked:
    """One request and all that came of it. `times_s` are those of its tokens."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.tokens: list[Token] = []
        self.times_s: list[float] = []
        self.finished: Finished | None = None
        self.error: NeuronDiError | None = None

    def take(self, token: Token) -> None:
        assert self.finished is None
        assert self.error is None
        self.tokens.append(token)
        self.times_s.append(now_s())

    @property
    def indices(self) -> list[int]:
        return [each.index for each in self.tokens]

    @property
    def is_complete(self) -> bool:
        return self.finished is not None and self.indices == list(range(NUM_TOKENS))

    def attempts(self) -> list[tuple[str, str, int, str | None, str | None]]:
        """Prefill worker, decode worker, first index, code, who was blamed."""
        return [
            (a.prefill_worker, a.decode_worker, a.first_index, a.code, a.blamed)
            for a in self.record.seal("error").attempts
        ]


class VirtualCluster:
    """The proxy's logic over workers of memory. `running` until it is exited."""

    def __init__(
        self, *workers: VirtualWorker, seed: int = 0, directory: Any = None, **limits: Any
    ) -> None:
        self.workers = {worker.record.worker_id: worker for worker in workers}
        self.directory = directory or ListDirectory([worker.record for worker in workers])
        self.limits = LimitOptions(**limits)
        self.health = Health(self, self.directory, self.limits)
        self.pairs = PairBook()
        self.router = Router(self.directory, self.health, self.pairs)
        rng = random.Random(seed)
        self.runner = RequestRunner(self, self.router, self.health, self.limits, rng)
        self.self_test = SelfTest(self, self.directory, self.health, self.limits, self.pairs, rng)
        self.legs: list[VirtualLeg] = []
        self._num_requests = 0

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self.health)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start_self_test(self) -> None:
        await self._stack.enter_async_context(self.self_test)

    def relist(self) -> None:
        """The directory learns of every worker that is there."""
        self.directory.records = [w.record for w in self.workers.values() if not w.is_gone]

    def open_leg(self, record: WorkerRecord, kind: str, leg: Any) -> VirtualLeg:
        opened = VirtualLeg(self.workers[record.worker_id], leg)
        self.legs.append(opened)
        return opened

    async def status(self, record: WorkerRecord, timeout_s: float) -> WorkerStatus:
        return await self.workers[record.worker_id].status(timeout_s)

    def are_all_legs_closed(self) -> bool:
        return all(leg.is_closed for leg in self.legs)

    async def ask(self, asked: Asked | None = None, request: ChoiceRequest = REQUEST) -> Asked:
        asked = asked or self.request()
        try:
            asked.finished = await self.runner.run(request, asked.record, asked.take)
        except NeuronDiError as error:
            asked.error = error
        mine = asked.record.request_id
        assert all(leg.is_closed for leg in self.legs if leg.message.request_id == mine)
        return asked

    def request(self) -> Asked:
        self._num_requests += 1
        request_id = RequestId(f"r{self._num_requests}")
        return Asked(RequestRecord(request_id=request_id, model="tiny"))


def two_by_two(**limits: Any) -> VirtualCluster:
    """p1, p2, d1, d2. A fresh cluster takes p1 and d1 first."""
    return VirtualCluster(
        *(VirtualWorker(name, "prefill") for name in ("p1", "p2")),
        *(VirtualWorker(name, "decode") for name in ("d1", "d2")),
        **limits,
    )


def one_by_one(**limits: Any) -> VirtualCluster:
    """p1 and d1."""
    return VirtualCluster(VirtualWorker("p1", "prefill"), VirtualWorker("d1", "decode"), **limits)


def failed(
    code: str = "internal_error",
    status: int = 500,
    *,
    fault: Any = "us",
    retryable: bool = True,
) -> Failed:
    return Failed(
        code=code, message=f"failed: {code}", http_status=status, retryable=retryable, fault=fault
    )
