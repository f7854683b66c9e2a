"""OpenAI's request documents, read and checked. Prompts are passed on unread.

Every field either works or is refused by its name; nothing a client asks for is dropped in
silence. Fields that say nothing of the answer (a user's name, a hint for caches) are taken.

Next: proxy/neuron_di_proxy/completion_request.py, proxy/neuron_di_proxy/chat_request.py
"""

from neuron_di_proxy.chat_request import read_chat
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.completion_request import read_completion

__all__ = ["ClientRequest", "read_chat", "read_completion"]
