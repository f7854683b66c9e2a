"""Every way to move blocks that the transfer benchmark compares: ours, a C program's, others'."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.contenders.transfer_segment import Settings
from benchmarks.line_process import LineProcess
from neuron_di.transfer_bench.measuring_end import MeasuringEnd
from neuron_di.transfer_bench.places import Choice

_C_SOURCE = Path(__file__).parent / "transfer_reference.c"


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer, from the moment the receiver asks until it knows that all bytes are there.

    Seconds. `cpu_s` is of both ends. `prepare_s` comes before: from ids to what can be posted.
    """

    wall_s: float
    prepare_s: float
    post_s: float
    cpu_s: float
    writer_s: float = 0.0  # of a transfer by writes: what the writing end says that it took


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """Seconds. `pair_s` goes from two processes that are ready until a first block has arrived."""

    open_s: float
    pair_s: float


class Way(Protocol):
    name: str
    version: str  # of what others made; empty: ours
    set_up: SetUp

    def move(self, choice: Choice) -> Sample: ...


@contextmanager
def running_on(cpus: set[int]) -> Iterator[None]:
    """Keep this thread, and the threads and processes that it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Ours:
    """A transfer engine of ours, as a lane of the measuring end. It chooses its blocks itself."""

    version = ""

    def __init__(
        self, end: MeasuringEnd, number: int, engine: str, *, cpus: tuple[int, int] | None = None
    ) -> None:
        """With `cpus`, the measuring end is kept on the first, and the other runs on the second."""
        self.name = engine if cpus is None else f"{engine} on two cores"
        self._cpus = os.sched_getaffinity(0) if cpus is None else {cpus[0]}
        self._end = end
        self._number = number
        with running_on(self._cpus):
            found = end.connect(number, engine)
            first = end.move(number, 1, verify=False)
            if first.kv_bytes == 0:
                end.move(number, 1, verify=False)  # and back
        self.set_up = SetUp(open_s=found.open_s, pair_s=found.connect_s + first.transfer_s)

    def move_anywhere(self, count: int, *, is_contiguous: bool, verify: bool = False) -> Sample:
        with running_on(self._cpus):
            moved = self._end.move(self._number, count, verify=verify, is_contiguous=is_contiguous)
        return Sample(moved.transfer_s, moved.plan_s, moved.post_s, moved.cpu_s)


class CReference:
    """The program of transfer_reference.c, compiled into `folder`.

    With `cpus`, the sink runs on the one and the source on the other. Where they may run anywhere,
    Linux may wake one on the core that the other has just left, which takes a small transfer a
    third of the time, a large one half as long again, and is what two hosts never have.
    """

    version = ""

    def __init__(
        self,
        segment: Settings,
        folder: Path,
        stack: ExitStack,
        *,
        cpus: tuple[int, int] | None = None,
    ) -> None:
        self.name = "C over TCP" if cpus is None else "C on two cores"
        program = _compiled(folder)
        place = (segment.path, str(segment.offset), str(segment.block_bytes))
        sink_cpu, source_cpu = cpus or ("any", "any")
        self._sink = LineProcess((program, "sink", *place, str(sink_cpu)))
        stack.callback(self._sink.end)
        self._source = LineProcess((program, "source", *place, str(source_cpu)))
        stack.callback(self._source.end)
        self._source.tell(str(self._sink.answer()))
        first = self.move(Choice.of([0], [segment.num_bytes // segment.block_bytes - 1]))
        self.set_up = SetUp(open_s=0.0, pair_s=first.wall_s)

    def move(self, choice: Choice) -> Sample:
        self._source.tell(_line(choice.source_ids))
        self._source.answer()
        before_s = self._source.cpu_s()
        self._sink.tell(_line(choice.block_ids))
        wall_ns, cpu_ns = self._sink.answer()
        cpu_s = cpu_ns / 1e9 + self._source.cpu_s() - before_s
        return Sample(wall_ns / 1e9, 0.0, 0.0, cpu_s)


class PeerPair:
    """A source and a sink of another library, each a process of its own."""

    def __init__(
        self, python: str, module: str, segment: Settings, transport: str, stack: ExitStack
    ) -> None:
        ends = []
        for role in ("source", "sink"):
            settings = {**asdict(segment), "role": role, "transport": transport}
            command = (python, "-m", f"benchmarks.contenders.{module}", json.dumps(settings))
            ends.append(LineProcess(command))
            stack.callback(ends[-1].end)
        self.source, self.sink = ends
        ready = [end.answer() for end in ends]
        self.version: str = ready[0]["version"]
        offers = [end.ask_to("offer") for end in ends]
        self.source.tell_to("connect", **offers[1])
        self.sink.tell_to("connect", **offers[0])
        connect_s = max(end.answer()["wall_s"] for end in ends)
        first = self.read(Choice.of([0], [segment.num_bytes // segment.block_bytes - 1]))
        self.set_up = SetUp(
            open_s=sum(each["open_s"] for each in ready), pair_s=connect_s + first.wall_s
        )

    def read(self, choice: Choice) -> Sample:
        """The sink fetches, and says to the source when it has all."""
        ids = {"source_ids": choice.source_ids, "block_ids": choice.block_ids}
        self.source.tell_to("progress")
        found = self.sink.ask_to("read", **ids)
        cpu_s = found["cpu_s"] + self.source.answer()["cpu_s"]
        return Sample(found["wall_s"], found["init_s"], 0.0, cpu_s)

    def write(self, choice: Choice) -> Sample:
        """The sink asks, the source writes and says when it is over."""
        ids = {"source_ids": choice.source_ids, "block_ids": choice.block_ids}
        init_s = self.source.ask_to("write", **ids)["init_s"]
        self.source.tell_to("write_now")
        found = self.sink.ask_to("await")
        written = self.source.answer()
        cpu_s = found["cpu_s"] + written["cpu_s"]
        return Sample(found["wall_s"], init_s, 0.0, cpu_s, written["wall_s"])


class PeerWay:
    """One direction of a pair."""

    def __init__(self, name: str, pair: PeerPair, *, writes: bool) -> None:
        self.version = pair.version
        self.name = f"{name} {'WRITE' if writes else 'READ'}"
        self.set_up = pair.set_up
        self.move = pair.write if writes else pair.read


def peer_ways(
    nixl_python: Path | None, mooncake_python: Path | None, segment: Settings, stack: ExitStack
) -> list[Way]:
    """Those that a Python was named for."""
    pairs = []
    if nixl_python is not None:
        for name, transport in (("NIXL shm", ""), ("NIXL tcp", "tcp")):
            pairs.append((name, str(nixl_python), "nixl_transfer", transport))
    if mooncake_python is not None:
        pairs.append(("Mooncake tcp", str(mooncake_python), "mooncake_transfer", "tcp"))
    ways: list[Way] = []
    for name, python, module, transport in pairs:
        pair = PeerPair(python, module, segment, transport, stack)
        ways += [PeerWay(name, pair, writes=writes) for writes in (False, True)]
    return ways


def _compiled(folder: Path) -> str:
    program = folder / "transfer_reference"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    if not program.exists():
        words = [compiler, "-O2", "-std=gnu11", "-o", str(program), str(_C_SOURCE)]
        subprocess.run(words, check=True)
    return str(program)


def _line(ids: list[int]) -> str:
    return f"{len(ids)} {' '.join(map(str, ids))}"
