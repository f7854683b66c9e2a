"""Bodies of requests for a model of which this is known."""

import json
from typing import Any

from neuron_di_proxy.chat_request import read_chat
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.completion_request import read_completion
from neuron_di_proxy.model_traits import ModelTraits

CHOICES_MAX = 8
MESSAGES = [{"role": "user", "content": "hi"}]
TRAITS = ModelTraits(tool_format="hermes", num_vocab=1000, context_tokens=512)


def read_completion_body(body: bytes, traits: ModelTraits = TRAITS) -> ClientRequest:
    return read_completion(body, choices_max=CHOICES_MAX, traits_of=lambda _: traits)


def read_chat_body(body: bytes, traits: ModelTraits = TRAITS) -> ClientRequest:
    return read_chat(body, choices_max=CHOICES_MAX, traits_of=lambda _: traits)


def completion(traits: ModelTraits = TRAITS, **fields: Any) -> ClientRequest:
    body = {"model": "tiny", "prompt": "hi"} | fields
    return read_completion_body(json.dumps(body).encode(), traits)


def chat(traits: ModelTraits = TRAITS, **fields: Any) -> ClientRequest:
    body = {"model": "tiny", "messages": MESSAGES} | fields
    return read_chat_body(json.dumps(body).encode(), traits)
