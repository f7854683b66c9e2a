"""What a transfer costs those who compute: `python -m benchmarks.transfer_interference`.

One core computes steps of a real model; the other one moves KV into the same process, or out of
it. Spells with transfers and without take turns. See benchmarks/README.md. Exit code 1 when a
decode step takes more than 2 % longer, or prefill does not step on while KV leaves.
"""

import argparse
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.line_process import LineProcess
from benchmarks.provenance import command_line, commit_description, machine_description
from benchmarks.transfer_interference_report import (
    QUIET,
    Spell,
    TransferInterferenceReport,
    print_report,
    shortfalls,
    write_report,
)
from benchmarks.transfer_mover import POOL_BYTES
from benchmarks.transfer_steps import Step, model_steps
from neuron_di.kv import KvIdentity
from neuron_di.testing import write_random_checkpoint
from neuron_di.transfer_bench.control_link import ControlLink, make_key
from neuron_di.transfer_bench.flags import KEY_VARIABLE
from neuron_di.transfer_bench.local_end import local_serving_end
from neuron_di.transfer_bench.measuring_end import MeasuringEnd
from neuron_di.transfer_bench.serving_end import ServingEnd
from neuron_di.transfer_bench.shape import Shape
from neuron_di.types import Incarnation, RequestId, WorkerId

MODULE = "benchmarks.transfer_interference"
ENGINES = ("shm", "tcp")
_MOVER = (sys.executable, "-m", "benchmarks.transfer_mover")


class Mover:
    """A thread that makes one transfer after the other while it is told to."""

    def __init__(self, move: Callable[[], object]) -> None:
        self._move = move
        self._is_wanted = threading.Event()
        self._is_idle = threading.Event()
        self._is_ending = False
        self.is_moving = False  # a transfer is open now
        self.num_moved = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Transfers, one after the other; none is open any more at the end."""
        self._is_idle.clear()
        self._is_wanted.set()
        try:
            yield
        finally:
            self._is_wanted.clear()
            self._is_idle.wait()

    def end(self) -> None:
        self._is_ending = True
        self._is_wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._is_wanted.wait()
            while self._is_wanted.is_set() and not self._is_ending:
                self.is_moving = True
                self._move()
                self.is_moving = False
                self.num_moved += 1
            if self._is_ending:
                return
            self._is_idle.set()


def receiving(engine: str, shape: Shape, stack: ExitStack) -> Mover:
    """Into this process, as a decode worker's transfers: each is digested as one of those is."""
    end = MeasuringEnd(stack.enter_context(local_serving_end()))
    stack.callback(end.close)
    end.open_pools(shape, POOL_BYTES)
    end.connect(0, engine)
    end.move(0, shape.num_blocks, verify=True)
    identity = KvIdentity(
        worker_id=WorkerId("prefill-0"),
        incarnation=Incarnation("a" * 32),
        request_id=RequestId("request"),
        attempt=0,
        layout_digest=end.pool.layout.digest(),
    )
    num_tokens = shape.num_blocks * end.pool.layout.block_size
    received = end.pool.block_ids()[: shape.num_blocks]  # as many as came, if not the same ones

    def move() -> None:
        end.move(0, shape.num_blocks, verify=False)
        end.pool.digests(received, identity, num_tokens)

    mover = Mover(move)
    stack.callback(mover.end)
    return mover


def sending(engine: str, shape: Shape, stack: ExitStack) -> Mover:
    """Out of this process, as a prefill worker's transfers."""
    key = make_key()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        command = (*_MOVER, host, str(port), engine, str(shape))
        process = LineProcess(command, {KEY_VARIABLE: key})
        stack.callback(process.end)
        sock, _ = listener.accept()
    serving = ServingEnd(ControlLink.answer(sock, key), None)
    threading.Thread(target=serving.serve, daemon=True).start()
    return _commanded(process, stack)


def elsewhere(what: str, shape: Shape, stack: ExitStack) -> Mover:
    """Nothing for this process: another one does it for itself."""
    process = LineProcess((*_MOVER, what, str(shape)))
    stack.callback(process.end)
    return _commanded(process, stack)


def _commanded(process: LineProcess, stack: ExitStack) -> Mover:
    process.answer()

    def move() -> None:
        process.tell("move")
        process.answer()

    mover = Mover(move)
    stack.callback(mover.end)
    return mover


def spell_of(role: str, kind: str, step: Step, mover: Mover | None, duration_s: float) -> Spell:
    """Compute for so long, with transfers where there is a mover."""
    durations_s: list[float] = []
    num_during = 0
    before = mover.num_moved if mover is not None else 0
    with ExitStack() as stack:
        if mover is not None:
            stack.enter_context(mover.running())
        end_s = time.perf_counter() + duration_s
        while (start_s := time.perf_counter()) < end_s:
            num_during += mover is not None and mover.is_moving
            step()
            durations_s.append(time.perf_counter() - start_s)
    num_moved = mover.num_moved - before if mover is not None else 0
    return Spell(role, kind, durations_s, num_during, num_moved)


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one to compute, one to move")
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    shape = Shape.of(options.shape)
    report = TransferInterferenceReport(
        command=command_line(MODULE, options, parser.parse_args([])),
        machine=machine_description(),
        commit=commit_description(),
        shape=str(shape),
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-transfer-")))
        write_random_checkpoint(folder / "model", "llama", size=options.model)
        os.sched_setaffinity(0, {cores[0]})  # of this thread, and of all that begin from here on
        movers: dict[str, dict[str, Mover | None]] = {
            "decode": {name: receiving(name, shape, stack) for name in ENGINES},
            "prefill": {name: sending(name, shape, stack) for name in ENGINES},
        }
        others: dict[str, Mover | None] = {
            "memcpy elsewhere": elsewhere("copy", shape, stack),
            "busy elsewhere": elsewhere("count", shape, stack),
        }
        os.sched_setaffinity(0, {cores[-1]})
        decode, prefill = stack.enter_context(model_steps(folder / "model"))
        for role, step in (("decode", decode), ("prefill", prefill)):
            kinds = {QUIET: None, **movers[role], **others}
            spell_of(role, QUIET, step, None, options.spell_s)  # warms up
            for number in range(options.rounds):
                for kind in kinds if number % 2 else reversed(kinds):
                    spell = spell_of(role, kind, step, kinds[kind], options.spell_s)
                    report.spells.append(spell)
        os.sched_setaffinity(0, set(cores))
    print_report(console, report)
    write_report(report, options.results)
    console.print(f"written: transfer_interference.md, .json in {options.results}")
    return 1 if shortfalls(report) else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--model", choices=["tiny", "25m", "125m"], default="25m")
    parser.add_argument("--shape", default="4096x16KiB", help="of each transfer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--spell-s", type=float, default=0.7)
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
