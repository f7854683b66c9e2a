"""One request: its text in and out, how its tokens are chosen, and when it ends."""

from neuron_di.request.chat_messages import content_text
from neuron_di.request.chat_template import ChatExtras, ChatTemplate
from neuron_di.request.output_text import OutputText
from neuron_di.request.prompt_wish import PromptWish
from neuron_di.request.request import Request, RequestStatus
from neuron_di.request.request_end import (
    Finish,
    accept_token,
    end_token_ids,
    resolve_max_tokens,
)
from neuron_di.request.template_traits import TemplateTraits, is_in_reasoning, template_traits
from neuron_di.request.token_rules import TokenRuleMaker, TokenRules, has_token_rules
from neuron_di.request.tokenizer import Tokenizer
from neuron_di.request.uniform import uniform

__all__ = [
    "ChatExtras",
    "ChatTemplate",
    "Finish",
    "OutputText",
    "PromptWish",
    "Request",
    "RequestStatus",
    "TemplateTraits",
    "TokenRuleMaker",
    "TokenRules",
    "Tokenizer",
    "accept_token",
    "content_text",
    "end_token_ids",
    "has_token_rules",
    "is_in_reasoning",
    "resolve_max_tokens",
    "template_traits",
    "uniform",
]
