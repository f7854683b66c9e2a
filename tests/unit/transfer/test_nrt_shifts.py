"""A call of a closed engine that fails part-way: nobody takes the next transfer's bytes for it.

The engine posts some of the call's messages, and goes on with the next call. The device matches by
order alone: what comes next at the other end goes into the rest of this one.
"""

import pytest
from nrt_kit import ended, two_ends
from test_nrt_drivers import MESSAGES
from test_nrt_endings import QUICK, held

SLOW = "function=sendrecv.send delay_us=30000"  # so that the others are there while the first goes
FAILS = {"prefill": "send_tensor", "decode": "recv_tensor"}


@pytest.mark.parametrize("kind", ["1", "eager"])
@pytest.mark.parametrize("peer_kind", ["1", "eager", None])
@pytest.mark.parametrize("failing", FAILS)
def test_what_is_posted_in_part_takes_no_bytes_of_the_next_transfer(kind, peer_kind, failing):
    kinds = {name: {"classes": kind if name == failing else peer_kind} for name in FAILS}
    with two_ends(QUICK, **kinds) as two:
        end = getattr(two, failing)
        two.prefill.place.fault(SLOW)
        failed = 2 * MESSAGES + 2  # of two ranks: the second message of the second transfer
        end.place.fault(f"function=nrt_async_sendrecv_{FAILS[failing]} call={failed} status=1")
        receives = [two.receive([number], [number]) for number in range(3)]
        with held(two.prefill):
            outcomes = [two.post(receive) for receive in receives]
            sends = [two.send(receive) for receive in receives]
        assert outcomes[0].error() is None
        assert (two.decode.blocks[0] == two.prefill.blocks[0]).all()
        assert None not in [outcome.error() for outcome in outcomes[1:]]
        own = outcomes[1].error() if failing == "decode" else ended(sends[1])
        assert "is_done: RuntimeError: the transfer failed" in own.message
        assert "posted" in end.pool.lost.message
