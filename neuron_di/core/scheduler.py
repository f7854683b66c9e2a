"""What the engine asks of a scheduler, whatever the worker's role.

    plan = scheduler.schedule()      decide
    backend computes the plan        the scheduler knows nothing of it
    plan.mark_computed()             tell what is done; then sample, finish, park
    scheduler.prefixes               what of a prompt's KV is to be kept, and copied

A request starts with blocks for what is known and for a part of its answer, and gets more as it
grows; where there are none left, the youngest gives way (growth.py).
Waiting requests start in the order of their age. Nobody overtakes the oldest, even one that
would fit: a long prompt waits for its turn, never for ever.
"""

from typing import Protocol

from neuron_di.core.block_count import BlockCount
from neuron_di.core.plan import StepPlan
from neuron_di.core.prefix_cache import PrefixCache
from neuron_di.errors import NeuronDiError
from neuron_di.request import Request
from neuron_di.types import FinishReason


class Scheduler(Protocol):
    """Owns the status and the blocks of its requests. Called by the engine's thread only.

    Nothing here blocks, computes or moves bytes. A call that breaks the rules raises
    LocalProtocolError and changes nothing.
    """

    @property
    def prefixes(self) -> PrefixCache | None:
        """Where KV of prompts is kept; None: nowhere."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_transferring(self) -> int: ...

    def add(self, request: Request) -> None:
        """Take a request into the waiting queue; from now on only `finish` lets it go.

        CapacityError when the queue is full; TooLarge when even an empty pool could not hold
        the request, which would block the queue for ever.
        """
        ...

    def failures(self) -> list[tuple[Request, NeuronDiError]]:
        """Who cannot go on, and why: asked, and finished, before each `schedule`."""
        ...

    def schedule(self) -> StepPlan | None:
        """Start whom there is room for, and return what to compute now; None: nothing."""
        ...

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is. It holds no blocks and no slot afterwards.

        No device write to its blocks may be in flight: call `Backend.quiesce` before.
        """
        ...

    def follow_exchanges(self) -> None:
        """Name the blocks that came in the place of those that are another worker's now."""
        ...

    def is_idle(self) -> bool:
        """True when no request is left and every block is free."""
        ...

    def count_blocks(self) -> BlockCount:
        """Where every block is now. Costs little: it looks at requests, not at blocks."""
        ...

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless states, limits and blocks add up. Reads every block."""
        ...
