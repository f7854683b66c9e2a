"""What an operator orders of a worker, and what the worker says while it obeys.

Orders go over HTTP to the worker's port, as JSON. The answer to one that takes its time is a line
of JSON now and then, the last of which is final.
"""

from typing import Annotated, Literal

import msgspec

from neuron_di.types import Incarnation, Role
from neuron_di.wire.codec import Decoder

ORDER_BYTES_MAX = 4096
WAIT_S_MAX = 86_400.0

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=WAIT_S_MAX)]


class PrepareDrain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say in your status that you are about to leave. Nothing else changes yet."""

    incarnation: Incarnation  # whom it is for: a successor at the same address is somebody else


class DrainTicket(msgspec.Struct, frozen=True, kw_only=True):
    """It says so, for as long as the ticket is good. It is good for one order.

    None: it is draining already, and a further order joins.
    """

    ticket: str | None
    expires_s: float = 0.0


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End once everything that runs is over. A second one joins the first.

    Without a ticket it is obeyed whatever was prepared.
    """

    incarnation: Incarnation
    ticket: str | None = None
    timeout_s: Seconds | None = None  # then what still runs is cut; None: the worker's own limit


class PrepareRole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say whether you could take this role. Nothing changes yet."""

    incarnation: Incarnation
    role: Role


class RoleTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Yes. The ticket is good for one commit, until it expires."""

    ticket: str
    before: Role
    role: Role
    expires_s: float


class CommitRole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Do it: drain, then serve in the other role, as another process to everybody."""

    ticket: str
    timeout_s: Seconds | None = None


class AbortOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forget that ticket, of either kind."""

    ticket: str


class DrainProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a drain. `cut`: the time was over, and what still ran was ended."""

    state: Literal["draining", "drained", "cut"]
    has_joined: bool = False  # an earlier order, whose time limit stays
    num_running: int = 0  # requests that are here, parked and received ones not among them
    num_parked: int = 0  # whose KV waits to be pulled
    num_receiving: int = 0  # whose KV is on its way here
    num_quarantined: int = 0  # blocks that a transfer may still touch
    lease_ends_s: float | None = None  # until parked KV that nobody pulls is given up
    left_s: float = 0.0  # until what still runs is cut
    num_finished: int = 0  # since the drain began
    num_left: int = 0  # whose client, or proxy, went away
    num_preempted: int = 0  # that gave way to others, and go on elsewhere
    failed: dict[str, int] = {}  # by the error's code
    num_cut: int = 0
    is_withdrawn: bool = False  # from the registry; said once, at the end


class RoleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the last change of role. `reverted`: it is back in its old one."""

    ticket: str
    before: Role
    role: Role
    state: Literal["changing", "changed", "reverted"]
    reason: str = ""


prepare_drain_decoder: Decoder[PrepareDrain] = Decoder(
    PrepareDrain, bytes_max=ORDER_BYTES_MAX, as_json=True
)
drain_ticket_decoder: Decoder[DrainTicket] = Decoder(
    DrainTicket, bytes_max=ORDER_BYTES_MAX, as_json=True
)
drain_order_decoder: Decoder[DrainOrder] = Decoder(
    DrainOrder, bytes_max=ORDER_BYTES_MAX, as_json=True
)
prepare_role_decoder: Decoder[PrepareRole] = Decoder(
    PrepareRole, bytes_max=ORDER_BYTES_MAX, as_json=True
)
commit_role_decoder: Decoder[CommitRole] = Decoder(
    CommitRole, bytes_max=ORDER_BYTES_MAX, as_json=True
)
abort_order_decoder: Decoder[AbortOrder] = Decoder(
    AbortOrder, bytes_max=ORDER_BYTES_MAX, as_json=True
)
role_ticket_decoder: Decoder[RoleTicket] = Decoder(
    RoleTicket, bytes_max=ORDER_BYTES_MAX, as_json=True
)
drain_progress_decoder: Decoder[DrainProgress] = Decoder(
    DrainProgress, bytes_max=ORDER_BYTES_MAX, as_json=True
)
role_outcome_decoder: Decoder[RoleOutcome | None] = Decoder(
    RoleOutcome | None, bytes_max=ORDER_BYTES_MAX, as_json=True
)
