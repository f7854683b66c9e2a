"""Engines that fail when a test says so, and what is said of the lane between two workers."""

from neuron_di.transfer import ShmEngine, TransferToken


def named(name):
    """A shm engine of another name, which does what a test says."""

    class Named(ShmEngine):
        fails_with = None  # connecting, or accepting
        receives_fail_with = None

        def __init__(self, pool):
            super().__init__(pool)
            self.name = name
            self.accepted = []
            self.connected = []
            self.sent = []

        def connect(self, peer, region, layout):
            self.connected.append(peer)
            if self.fails_with is not None:
                raise self.fails_with
            super().connect(peer, region, layout)

        def accept(self, peer, region, layout):
            if self.fails_with is not None:
                raise self.fails_with
            self.accepted.append(peer)

        def post_send(self, peer, send):
            self.sent.append(send)
            return super().post_send(peer, send)

        def post_receive(self, peer, receive):
            if self.receives_fail_with is not None:
                token = TransferToken()
                token.complete(self.receives_fail_with)
                return token
            return super().post_receive(peer, receive)

    return Named


FAST, SAFE = named("fast"), named("safe")


def engines(side):
    return {engine.name: engine for engine in side.lanes.engines}


def lane_of(decode, prefill):
    lane = decode.buffer(prefill).lane
    return lane.name, lane.reason, lane.is_fallback
