"""An endpoint of the differential suite that answers as a test says."""

import json
from collections.abc import Callable
from typing import Any

from neuron_di.testing.conformance import Endpoint, Heard
from neuron_di.testing.conformance.exchange import Ask

Answers = Callable[[Ask], Heard]


class AnsweringEndpoint(Endpoint):
    """Answers at once, without a socket."""

    def __init__(self, side: Any, answers: Answers) -> None:
        super().__init__(side, f"http://{side.lower()}", None, model="m")  # type: ignore[arg-type]
        self.answers = answers

    async def send(self, ask: Ask) -> Heard:
        return self.answers(ask)


def whole(document: Any, *, status: int = 200) -> Heard:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return Heard(status=status, headers={"content-type": "application/json"}, body=body)


def stream(chunks: list[Any]) -> Heard:
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    body = "".join([*events, "data: [DONE]\n\n"]).encode()
    return Heard(status=200, headers={"content-type": "text/event-stream"}, body=body)
