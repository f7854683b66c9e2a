"""One attempt at a request: where it runs, what it is given, and what became of it."""

import msgspec

from neuron_di.clock import Deadline
from neuron_di.errors import Preempted
from neuron_di.types import RequestId
from neuron_di.wire import LegReceipt, WorkerRecord
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.route import Route


class Attempt(msgspec.Struct, kw_only=True):
    """Made by recovery, written by launch, read by receipts.

    `emitted` are the ids of all tokens that earlier attempts gave to the client. Workers get
    them in the leg, and the first token of this attempt has the index after them.
    """

    request_id: RequestId
    number: int
    request: ChoiceRequest
    route: Route
    emitted: tuple[int, ...]
    accepted_s: float  # when the request came, before its first attempt
    deadline: Deadline  # of the request, all attempts together
    has_given_way: bool = False  # an earlier one was preempted
    begun_with: int | None = None  # context_tokens of the attempt that this one continues
    num_tokens: int = 0  # that this attempt gave
    is_parked: bool = False  # prefill did its part
    num_prompt: int = 0  # the prompt's tokens, as the worker said; 0: it has not yet
    num_cached: int = 0  # of the prompt's tokens: the worker found their KV, as it said
    prefill: LegReceipt | None = None
    decode: LegReceipt | None = None
    code: str | None = None  # why it failed; None: it runs, ended well or was given up
    blamed: WorkerRecord | None = None  # who is at fault
    accuser: WorkerRecord | None = None  # the partner that says so, and may be wrong
    refused_by: WorkerRecord | None = None  # who has no room: nobody's fault

    @property
    def wants_room(self) -> bool:
        """Whether a worker refused it before anything came of it, or let it give way to others:
        for want of room, which is nobody's fault. To give way once is to wait for room: whatever
        refuses it after that is of the same kind, though prefill has given a token by then."""
        if self.refused_by is None:
            return False
        return not self.num_tokens or self.gave_way or self.has_given_way

    @property
    def gave_way(self) -> bool:
        return self.code == Preempted.code

    def context_tokens(self) -> int:
        """What prompt and answer may have: as much as the smallest worker, from the first on."""
        route = self.route
        return self.begun_with or min(route.prefill.context_tokens, route.decode.context_tokens)

    def tokens_max(self) -> int:
        """What an answer has at most, by what was asked for and by what a context holds."""
        asked = self.request.sampling.max_tokens
        return self.context_tokens() if asked is None else min(asked, self.context_tokens())
