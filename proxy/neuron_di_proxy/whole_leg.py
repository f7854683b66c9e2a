"""An attempt at one worker that does it all: its only leg is the sequence of tokens."""

from neuron_di.errors import RemoteProtocolError
from neuron_di.wire import Finished, Token
from neuron_di_proxy.inbox import Heard
from neuron_di_proxy.leg_merge import Running
from neuron_di_proxy.token_lane import Lane


class WholeLeg(Running):
    """A worker that does it all. Between tokens it may prefill for others."""

    def step(self, heard: Heard) -> None:
        said = heard.said
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Finished):
            self._attempt.prefill = self._attempt.decode = said.receipt
            self.complete(said)
            self.end(said)
        elif isinstance(said, Token):
            self.give(said)
            self.praise()
            self.inbox.relay("whole", self.give)
            self.take_lane("whole")
        else:
            raise RemoteProtocolError(f"a worker sent {type(said).__name__} to a whole leg")

    def note_taken(self, lane: Lane) -> None:  # noqa: ARG002 - when it took them does not matter
        self.praises["whole"]()
