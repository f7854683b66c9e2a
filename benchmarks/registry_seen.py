"""What the processes of the registry benchmark share: what they know, and how they are told.

Needs the standard library only: one of them runs where neuron_di is not installed.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PREFIX = "/neuron-di"  # in etcd, before /workers/

# (worker, number of the change, when by the machine's monotonic clock in ns)
Moment = tuple[str, int, int]


class Seen:
    """A watcher's view: the latest number each worker announced. Usable from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers: dict[str, int] = {}
        self._log: list[Moment] = []

    def note(self, worker: str, number: int) -> None:
        if number <= self._numbers.get(worker, -1):
            return
        with self._changed:
            self._numbers[worker] = number
            self._log.append((worker, number, time.monotonic_ns()))
            self._changed.notify_all()

    def wait(self, wanted: dict[str, int], timeout_s: float) -> list[str]:
        """Until each worker is seen with its number or a later one. Those that are not."""

        def missing() -> list[str]:
            return [name for name, least in wanted.items() if self._numbers.get(name, -1) < least]

        with self._changed:
            self._changed.wait_for(lambda: not missing(), timeout_s)
            return missing()

    def take_log(self) -> list[Moment]:
        """What was seen since it was asked last."""
        with self._changed:
            log, self._log = self._log, []
        return log


class Changes:
    """Numbers the changes of some workers, and makes them in turn. `on_change` announces one."""

    def __init__(self, workers: list[str], on_change: Callable[[str], None]) -> None:
        self.numbers = dict.fromkeys(workers, 0)
        self._on_change = on_change
        self._next = 0

    def change(self, worker: str) -> Moment:
        self.numbers[worker] += 1
        moment = (worker, self.numbers[worker], time.monotonic_ns())
        self._on_change(worker)
        return moment

    def touch_all(self) -> list[Moment]:
        return [self.change(worker) for worker in self.numbers]

    def one_more(self) -> Moment:
        workers = list(self.numbers)
        self._next += 1
        return self.change(workers[self._next % len(workers)])


def answer_commands(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Read commands, a line of JSON each, until there are no more; say what `answer` returns."""
    say("ready")
    for line in sys.stdin:
        say(answer(json.loads(line)))


def say(word: Any) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def answer_of_announcer(
    command: dict[str, Any], changes: Changes, announce: Callable[[], None]
) -> Any:
    """`announce`: begin. `touch`: change every worker once. `change`: for so many seconds."""
    match command["do"]:
        case "announce":
            begun_ns = time.monotonic_ns()
            announce()
            return begun_ns
        case "touch":
            return changes.touch_all()
        case "change":
            made, pause_s = [], 1 / command["per_s"]
            at_s = time.monotonic()
            for _ in range(round(command["seconds"] * command["per_s"])):
                at_s += pause_s
                time.sleep(max(0.0, at_s - time.monotonic()))
                made.append(changes.one_more())
            return made
    raise ValueError(command)


def answer_of_watcher(command: dict[str, Any], seen: Seen) -> Any:
    """`wait`: for these workers with these numbers. `log`: what was seen since the last."""
    match command["do"]:
        case "wait":
            return seen.wait(command["wanted"], command["timeout_s"])
        case "log":
            return seen.take_log()
    raise ValueError(command)
