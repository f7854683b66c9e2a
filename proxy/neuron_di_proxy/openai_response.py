"""The writer of an answer, in the shape of the endpoint that was asked.

Next: proxy/neuron_di_proxy/answer_document.py
"""

from neuron_di.types import RequestId
from neuron_di_proxy.answer_document import Answer
from neuron_di_proxy.chat_answer import ChatAnswer, ChatWriter
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.completion_answer import AlikeOfPrompt, CompletionAnswer, CompletionWriter
from neuron_di_proxy.model_traits import ModelTraits

__all__ = ["DONE", "Answer", "answer_to"]

DONE = b"data: [DONE]\n\n"


def answer_to(request: ClientRequest, request_id: RequestId, traits: ModelTraits) -> Answer:
    """A writer for `request`. What the model can do decides how its text is read."""
    indices = range(request.num_choices)
    if request.endpoint == "completions":
        alike = [AlikeOfPrompt() for _ in request.prompts]
        writers = [CompletionWriter(request, each, alike[each // request.n]) for each in indices]
        return CompletionAnswer(request, request_id, writers)
    return ChatAnswer(
        request, request_id, [ChatWriter(request, request_id, index, traits) for index in indices]
    )
