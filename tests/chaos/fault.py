"""What a fault is: what is done to whom at a phase, and what must become of the requests.

    N  no visible effect but time        R  another attempt, the client unaware
    C  continued at the next index       E  exactly one truthful error
    A  the client is gone: all is freed
    R/C  one of the two: the first token may reach the client before the fault is noticed
    C/N  one of the two: a copy that needs nobody any more may be faster
    N/A  either: hypercorn may take a client that half-closes for one that has left
    R/C/N  any of them: what matters may have been said just before

A fault strikes while a process is held at a phase, and that process goes on after it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from .client import Manners, Stream
from .cluster import Cluster, Place

Phase = Literal["q", "p", "k", "t", "d", "f"]
Outcome = Literal["N", "R", "C", "R/C", "C/N", "R/C/N", "E", "A", "N/A"]

PHASES: tuple[Phase, ...] = ("q", "p", "k", "t", "d", "f")
PHASE_NAMES: Mapping[Phase, str] = {
    "q": "queued",
    "p": "prefilling",
    "k": "parked",
    "t": "transferring",
    "d": "decoding",
    "f": "finishing",
}


@dataclass(slots=True)
class Scene:
    """Where a fault strikes: the two workers of the requests, and the clients' manners."""

    cluster: Cluster
    prefill: Place
    decode: Place
    let_go: Callable[[], None]  # the held process goes on
    leave: asyncio.Event = field(default_factory=asyncio.Event)  # the clients hang up
    read_on: asyncio.Event = field(default_factory=asyncio.Event)  # the clients read
    streams: list[asyncio.Task[Stream]] = field(default_factory=list)


Act = Callable[[Scene], Awaitable[None]]


async def nothing(_: Scene) -> None:
    """No action."""


def gentle(_: Scene) -> Manners:
    return Manners()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the matrix. A phase without an outcome does not apply.

    `strike` happens at the phase, `after` once every request has ended, before blocks are
    counted. `queued_at` is the worker whose queue phase q means. A fault that does not
    `spare_others` ends also the request that comes just after it.
    """

    name: str
    title: str
    outcomes: Mapping[Phase, Outcome]
    strike: Act
    after: Act = nothing
    manners: Callable[[Scene], Manners] = gentle
    queued_at: Literal["prefill", "decode"] = "prefill"
    spares_others: bool = True
    hangs_up: Literal["client", "proxy"] = "client"  # where the outcome is A


def outcomes(letters: str) -> dict[Phase, Outcome]:
    """As the matrix writes it: "R R C C N N", "-" where it does not apply."""
    allowed = {letter: letter for letter in get_args(Outcome)}
    return {
        phase: allowed[letter]
        for phase, letter in zip(PHASES, letters.split(), strict=True)
        if letter != "-"
    }
