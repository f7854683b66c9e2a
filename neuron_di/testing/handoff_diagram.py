"""Draws the hand-over tables: prints docs/handoff.md.

python -m neuron_di.testing.handoff_diagram > docs/handoff.md
"""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from neuron_di.wire import handoff

Row = tuple[tuple[Enum, Enum], tuple[Enum, tuple[Enum, ...]]]
Table = Mapping[Any, tuple[Enum, tuple[Enum, ...]]]  # by (state, event); one type for all three

_INTRO = """\
# The life of a hand-over

Generated from `neuron_di/wire/handoff.py` by `make handoff-diagram`; a test keeps it so.

A prefill worker computes a prompt's KV, a decode worker copies it and continues, and the proxy
passes both workers' tokens on. Each of the three keeps one state for every attempt at a request
and moves it only by its table below: in a state, an event leads to the next state and to
actions, in the order written. What is not in a table is forbidden: the peer's protocol error
when the peer caused it, a bug of ours otherwise.

Three answers are kept apart. *Not yet*: it is being computed. *Never*: it will not come, so do
not wait. *Unknown*: nothing was heard of it, perhaps because a message was faster than the
request, so its answer is "not yet" under a lease.

`make handoff-model` tries every order of events, up to three faults: lost, doubled and
overtaking messages, broken links, crashed workers. It checks that no block is reused while it is
read (but for a reader that has not let go when its quarantine ends: its digests then fail), that
everything comes home and that nobody waits in vain.
"""

_SENDER = """\
The `SendBuffer` of a prefill worker. *Expect*, *Park* and *Drop* come from its own prefill leg,
*LeaseEnded* from the clock, *ReaderLost* from the link, the others from the decode worker that
asked first: its reader. What another worker says about the request never reaches the table.
Where there is no reader, what would be said to it is not said, and blocks that would wait for it
are free.
"""

_RECEIVER = """\
The `RecvBuffer` of a decode worker. *NotYet*, *Never* and *Ready* come from the prefill worker,
*Tick* and *LinkLost* from the link to it, the others from the decode leg and its engine.
"""

_LAUNCH = """\
The proxy, for one attempt. Within a leg events come in order; between the two legs there is no
order, so decode's may have to wait for prefill's.
"""


def handoff_page() -> str:
    """docs/handoff.md."""
    return "\n".join(
        [
            _INTRO,
            *_section("Sender", _SENDER, handoff.SENDER, handoff.SenderState.UNKNOWN),
            *_section("Receiver", _RECEIVER, handoff.RECEIVER, handoff.ReceiverState.UNKNOWN),
            *_section("Launch", _LAUNCH, handoff.LAUNCH, handoff.LaunchState.LAUNCHED),
        ]
    )


def descriptions(kind: type[Enum]) -> dict[Enum, str]:
    """What each member is, as the comment beside it says. Those without one are left out."""
    found = re.findall(r"^    (\w+) = .*?  # (.+)$", inspect.getsource(kind), re.MULTILINE)
    return {kind[name]: text for name, text in found}


def _section(title: str, text: str, table: Table, start: Enum) -> Iterable[str]:
    kinds = [type(member) for member in next(iter(table))]
    actions = next(action for _, actions in table.values() for action in actions)
    yield f"## {title}\n\n{text}"
    for kind in (*kinds, type(actions)):
        if found := descriptions(kind):
            noun = re.sub("Sender|Receiver|Launch", "", kind.__name__).lower()
            yield f"| {noun} | meaning |\n|---|---|"
            yield from (f"| {member.value} | {what} |" for member, what in found.items())
            yield ""
    yield _diagram(table, start)
    yield "| state | event | next | actions |\n|---|---|---|---|"
    for (before, event), (after, actions_) in _sorted(table):
        named = ", ".join(action.value for action in actions_) or "–"
        where = "" if after is before else after.value
        yield f"| {before.value} | {event.value} | {where or '(same)'} | {named} |"
    yield ""


def _diagram(table: Table, start: Enum) -> str:
    """One arrow for each pair of states; events with the same actions share a line on it."""
    arrows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for (before, event), (after, actions) in _sorted(table):
        lines = arrows.setdefault((before.value, after.value), {})
        lines.setdefault(", ".join(action.value for action in actions), []).append(event.value)
    text = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start.value}"]
    for (source, target), lines in arrows.items():
        labels = [
            ", ".join(events) + (f" / {actions}" if actions else "")
            for actions, events in lines.items()
        ]
        text.append(f"    {source} --> {target} : {'<br/>'.join(labels)}")
    return "\n".join([*text, "    over --> [*]", "```", ""])


def _sorted(table: Table) -> list[Row]:
    """In the order in which states and events are declared."""

    def place(row: Row) -> tuple[int, int]:
        state, event = row[0]
        return list(type(state)).index(state), list(type(event)).index(event)

    return sorted(table.items(), key=place)


if __name__ == "__main__":
    sys.stdout.write(handoff_page())
