"""An operator's order as it goes on: what it waits for now, and what has been reached."""

from collections.abc import Iterable
from typing import Literal

from rich.console import Console

from neuron_di.terminal_text import printable
from neuron_di.wire.admin import DrainProgress
from neuron_di_proxy.admin_order import AdminLine

Order = Literal["drain", "role"]


def show_order(worker: str, lines: Iterable[AdminLine], order: Order = "drain") -> int:
    """Print the lines of an order. Returns the exit code: 1 when something failed or was cut.

    What it waits for is drawn over on a terminal, and a line for each change elsewhere.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    said, code = "", 1
    is_under_way = False
    try:
        with console.status("asking the proxy") as status:
            for line in lines:
                is_under_way = is_under_way or line.phase not in ("ordered", "prepared", "failed")
                words = printable(_words(worker, line))
                if line.phase == "draining":
                    status.update(words)
                    if not console.is_terminal and _steady(words) != _steady(said):
                        console.print(words)
                    said = words
                    continue
                is_bad = line.phase == "failed"
                console.print(f"{'✗' if is_bad else '✓'} {words}", style="red" if is_bad else None)
                status.update(f"{worker}: what comes next")
                code = 0 if line.phase == "done" and line.is_clean else 1
    except KeyboardInterrupt:
        console.print(_without_you(order, is_under_way=is_under_way))
        raise
    return code


def _without_you(order: Order, *, is_under_way: bool) -> str:
    """What becomes of an order that nobody follows any more."""
    if not is_under_way:
        return "nobody has said yet that it began: `neuron-di status` shows whether it did"
    if order == "drain":
        return "the drain goes on without you: the same order again joins it"
    return "the change goes on without you: `neuron-di status` shows which role it ends in"


def _steady(words: str) -> str:
    """Without the time that is left, which changes each second."""
    return words.partition(" (")[0]


def _words(worker: str, line: AdminLine) -> str:
    progress = line.progress
    if line.phase == "draining":
        return f"{worker} drains: {_waits_for(progress)}" if progress is not None else line.words
    if line.phase == "drained" and progress is not None:
        return (
            f"{worker} is empty: {_became(progress)}"
            if progress.state == "drained"
            else (f"time is over: {_became(progress)}")
        )
    if line.phase == "done" and progress is not None and not line.words:
        return f"{worker} has ended: {_became(progress)}"
    return line.words


def _waits_for(progress: DrainProgress) -> str:
    """Such as: 3 running, 1 parked KV (its lease ends in 12 s), at most 48 s more"""
    parts = [
        f"{number} {words}"
        for number, words in (
            (progress.num_running, "running"),
            (progress.num_receiving, "receiving KV"),
            (progress.num_parked, "parked KV"),
            (progress.num_quarantined, "blocks that a transfer may still touch"),
        )
        if number
    ]
    limits = [f"at most {progress.left_s:.0f} s more"]
    if progress.lease_ends_s is not None:
        limits.insert(0, f"lease ends in {progress.lease_ends_s:.0f} s")
    if progress.has_joined:
        limits.append("as ordered before")
    return f"{', '.join(parts) or 'nothing is left'} ({', '.join(limits)})"


def _became(progress: DrainProgress) -> str:
    """What became of the requests that ran when the drain began."""
    parts = [_count(progress.num_finished, "request") + " finished"]
    parts += [f"{number} failed ({code})" for code, number in sorted(progress.failed.items())]
    if not progress.failed:
        parts.append("none failed")
    if progress.num_preempted:
        parts.append(f"{progress.num_preempted} gave way to others, to go on elsewhere")
    if progress.num_left:
        parts.append(f"{progress.num_left} were given up by their clients")
    if progress.state == "cut":
        parts.append(
            f"{_count(progress.num_cut, 'request')} still ran "
            f"({_still(progress)}): cut here, they go on with other workers if there are any"
        )
    if not progress.is_withdrawn:
        parts.append("the registry did not confirm: its key there ends with its lease")
    return ", ".join(parts)


def _still(progress: DrainProgress) -> str:
    parts = [
        f"{progress.num_running} running",
        f"{progress.num_receiving} receiving KV",
        f"{progress.num_parked} with parked KV",
    ]
    return ", ".join(part for part in parts if not part.startswith("0 ")) or "no leg"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
