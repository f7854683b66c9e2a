"""One request: its text in and out, how its tokens are chosen, and when it ends."""

from neuron_di.request.chat_template import ChatTemplate
from neuron_di.request.output_text import OutputText
from neuron_di.request.request import Request, RequestStatus
from neuron_di.request.sampling import (
    Finish,
    TokenOutcome,
    accept_token,
    check_sampling,
    end_token_ids,
    resolve_max_tokens,
)
from neuron_di.request.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Finish",
    "OutputText",
    "Request",
    "RequestStatus",
    "TokenOutcome",
    "Tokenizer",
    "accept_token",
    "check_sampling",
    "end_token_ids",
    "resolve_max_tokens",
]
