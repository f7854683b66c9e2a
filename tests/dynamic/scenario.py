"""Workers come, go, die, stand still and change their role, one after another or all at once.

before    p0 p1     d0 d1 d2
joined    p2        d3 d4
drained   p0        d0
killed    p1        d1
frozen              d3
changed   d2, to prefill
after     p2 d2     d3 d4
"""

import asyncio

from neuron_di.types import Role

from .events import Stage, pause

FROZEN_FOR_S = 4.5  # longer than it takes to be noticed
FIRST: tuple[tuple[str, Role], ...] = (
    ("p0", "prefill"),
    ("p1", "prefill"),
    ("d0", "decode"),
    ("d1", "decode"),
    ("d2", "decode"),
)


async def one_by_one(stage: Stage, calm_s: float) -> None:
    """Each change alone, with so much time after it."""
    await pause(calm_s)
    for name in ("d3", "d4"):
        await stage.join(name, "decode")
        await pause(calm_s)
    await stage.join("p2", "prefill")
    await pause(calm_s)
    for name in ("d0", "p0"):
        await stage.drain(name)
        await pause(calm_s)
    for name in ("d1", "p1"):
        await stage.kill(name)
        await pause(calm_s)
    await stage.role("d2", "prefill")
    await pause(calm_s)
    async with stage.frozen("d3"):
        await pause(FROZEN_FOR_S)
    await pause(calm_s)


async def all_at_once(stage: Stage) -> None:
    """The same, in a quarter of the time: what can overlap does."""
    async with stage.frozen("d2"):
        await asyncio.gather(
            stage.join("d3", "decode"),
            stage.join("d4", "decode"),
            stage.join("p2", "prefill"),
            pause(FROZEN_FOR_S),
        )
    await pause(2.0)
    await asyncio.gather(stage.drain("d0"), stage.drain("p0"))
    await asyncio.gather(stage.kill("d1"), stage.kill("p1"))
    await pause(1.5)
    await stage.role("d2", "prefill")
    await pause(2.0)
