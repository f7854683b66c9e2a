"""What a decode worker can say of a request, and how to bring a SendBuffer into any state."""

from transfer_kit import BareDecode, Prefill, R, done_of, pull_of

from neuron_di.wire import Abort, FromDecode, Hold, LookupAll
from neuron_di.wire.handoff import SenderEvent, SenderState

WORDS: dict[SenderEvent, FromDecode] = {
    SenderEvent.LOOKUP: LookupAll(request_id=R, attempt=0),
    SenderEvent.HOLD: Hold(request_id=R, attempt=0),
    SenderEvent.PULL: pull_of(),
    SenderEvent.DONE: done_of(),
    SenderEvent.ABORT: Abort(request_id=R, attempt=0, reason="why"),
}
PULL, DONE = WORDS[SenderEvent.PULL], WORDS[SenderEvent.DONE]


async def bring_to(state: SenderState, prefill: Prefill, peer: BareDecode) -> None:
    buffer = prefill.buffer
    if state not in (SenderState.UNKNOWN, SenderState.ASKED):
        buffer.expect(R, 0)
    if state is not SenderState.UNKNOWN:
        await peer.lookup()
    if state in (SenderState.PARKED, SenderState.PULLING, SenderState.RECALLED, SenderState.OVER):
        buffer.park(prefill.ready())
        await peer.answers()
    if state in (SenderState.PULLING, SenderState.RECALLED, SenderState.OVER):
        await peer.answers(PULL)
    if state is SenderState.RECALLED:
        buffer.drop(R, 0, "cancelled")
        await peer.answers()
    elif state is SenderState.OVER:
        await peer.answers(DONE)
    assert state_of(prefill) is state


def state_of(prefill: Prefill) -> SenderState:
    entry = prefill.buffer.lookup_dict.get((R, 0))
    return prefill.buffer._state_of((R, 0)) if entry is None else entry.state
