"""A streamed answer over a real reply to a rig's socket."""

import json

from lane_rig import Rig, payload_of
from scripted_worker import token

from neuron_di.clock import now_s
from neuron_di.types import RequestId
from neuron_di_proxy.answer import StreamedAnswer
from neuron_di_proxy.completion_request import read_completion
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.openai_response import answer_to
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.reply import EVENT_STREAM
from neuron_di_proxy.socket_reply import SocketReply
from neuron_di_proxy.token_lane import relay_told


class Streamed:
    """A streamed answer with one choice, over a real reply to a rig's socket."""

    def __init__(self):
        self.rig = Rig()
        self.rig.transport.is_closing = lambda: False
        self.reply = SocketReply(self.rig.transport, self.rig.outlet, is_chunked=True, closes=False)
        body = json.dumps({"model": "tiny", "prompt": "hi", "stream": True}).encode()
        self.wanted = read_completion(body, choices_max=8, traits_of=lambda _: ModelTraits())
        self.record = RequestRecord(request_id=RequestId("r"), model="tiny")
        answer = answer_to(self.wanted, RequestId("r"), ModelTraits())
        self.sink = StreamedAnswer(answer, [self.record], self.reply, lambda: [EVENT_STREAM])

    def hear(self, index):
        given = token(index)
        self.record.count_token(given)
        self.sink.token(0, given)

    def lane(self):
        return self.sink.lane(0, self.rig.gaps)


def tell(lane, *indices):
    """Tokens by their lane, as one frame."""
    tokens = [(7, index, 100 + index, f"t{index}") for index in indices]
    others, _, failures = relay_told(payload_of(tokens), {7: lane}, now_s())
    assert (others, failures) == ([], [])
