"""What the words of a pair's legs are to the LAUNCH table, and when it need not be asked."""

from collections.abc import Mapping
from functools import cache

from neuron_di.errors import KvMissing, NeuronDiError, RemoteProtocolError
from neuron_di.wire import Finished, Parked, Released, Token
from neuron_di.wire.handoff import LAUNCH, LaunchAction, LaunchEvent, LaunchState
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.inbox import Heard, Side

_EVENTS: Mapping[tuple[Side, type], LaunchEvent] = {
    ("prefill", Token): LaunchEvent.PREFILL_TOKEN,
    ("prefill", Parked): LaunchEvent.PREFILL_PARKED,
    ("prefill", Released): LaunchEvent.PREFILL_RELEASED,
    ("prefill", Finished): LaunchEvent.PREFILL_FINISHED,
    ("decode", Token): LaunchEvent.DECODE_TOKEN,
    ("decode", Finished): LaunchEvent.DECODE_FINISHED,
}
_DECODE_TOKEN = LaunchEvent.DECODE_TOKEN
_OF_DECODE = (
    LaunchEvent.DECODE_TOKEN,
    LaunchEvent.DECODE_FINISHED,
    LaunchEvent.DECODE_FAILED,
    LaunchEvent.DECODE_DENIED,
)
_ONLY_EMIT = (LaunchAction.EMIT,)


def event_of(heard: Heard) -> LaunchEvent:
    """RemoteProtocolError for what a leg of that side does not say; a bug of ours is raised."""
    side, said = heard.side, heard.said
    if not isinstance(said, Exception):
        event = _EVENTS.get((side, type(said)))
        if event is None:
            raise RemoteProtocolError(f"a worker sent {type(said).__name__} to a {side} leg")
        return event
    if not isinstance(said, NeuronDiError):
        raise said  # a bug of ours
    is_denied = failure_of(said).code == KvMissing.code
    if side == "prefill":
        return LaunchEvent.PREFILL_DENIED if is_denied else LaunchEvent.PREFILL_FAILED
    return LaunchEvent.DECODE_DENIED if is_denied else LaunchEvent.DECODE_FAILED


@cache
def is_steady(state: LaunchState, *, is_alone: bool = False) -> bool:
    """True where a decode worker's token is emitted, and nothing else happens, by the table.

    Where decode `is_alone`, as prefill has said its last word, that is true also where a token
    moves the table to a state in which it has the same answer to all that decode may say.
    """
    step = LAUNCH.get((state, _DECODE_TOKEN))
    if step is None or step.actions != _ONLY_EMIT:
        return False
    if step.state is state:
        return True
    return is_alone and all(
        LAUNCH.get((state, e)) == LAUNCH.get((step.state, e)) for e in _OF_DECODE
    )
