"""What a decode worker says about a hand-over, as the RECEIVER table has it."""

from neuron_di.errors import KvMissing
from neuron_di.transfer.lanes import Lane
from neuron_di.transfer.recv_entry import Cause, Entry, Key
from neuron_di.wire import Abort, Done, FromDecode, Hold, LookupAll, Never, PeerAddress, Pull
from neuron_di.wire.handoff import ReceiverAction
from neuron_di.wire.signal import REASON_CHARS_MAX


def cause_of(never: Never, peer: PeerAddress) -> Cause:
    """Why a request fails that this was said of."""
    error = KvMissing(f"prefill worker {peer.worker_id} has no KV to give: {never.reason}")
    return Cause(error=error, reason=never.reason)


def word_of(
    action: ReceiverAction, key: Key, entry: Entry, cause: Cause, lane: Lane | None
) -> FromDecode:
    """The message that a "send …" action of the table stands for."""
    request_id, attempt = key
    match action:
        case ReceiverAction.SEND_LOOKUP:
            return LookupAll(request_id=request_id, attempt=attempt, streams=entry.streams)
        case ReceiverAction.SEND_HOLD:
            return Hold(request_id=request_id, attempt=attempt)
        case ReceiverAction.SEND_PULL:
            assert lane is not None, "nothing is pulled before it is connected"
            return Pull(
                request_id=request_id,
                attempt=attempt,
                engine=lane.name,
                block_ids=list(entry.block_ids),
                num_held=entry.num_held,
            )
        case ReceiverAction.SEND_DONE:
            arrived = entry.arrived
            return Done(
                request_id=request_id,
                attempt=attempt,
                engine=arrived.engine,
                form=arrived.form,
                kv_bytes=arrived.kv_bytes,
                transfer_s=arrived.transfer_s,
            )
        case _:
            assert action is ReceiverAction.SEND_ABORT, "the others say nothing"
            reason = (cause.reason or "the request was given up")[:REASON_CHARS_MAX]
            return Abort(request_id=request_id, attempt=attempt, reason=reason)
