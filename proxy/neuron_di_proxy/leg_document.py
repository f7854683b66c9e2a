"""A leg as its worker gets it: a document in pieces, of which a long prompt is one.

The prompt is the client's own JSON, so its piece is a part of the client's body: no byte of it is
copied on its way.
"""

from typing import TypeAlias

import msgspec
from msgspec import structs

from neuron_di.wire import PrefillLeg, encode_json

Document: TypeAlias = tuple[bytes | memoryview, ...]

# Shorter prompts are copied: to take a document apart costs more.
LONG_PROMPT_BYTES = 64 << 10

_MARK = msgspec.Raw(b"0")
_MARKED = b',"prompt":0,'  # in a string its quotes would be escaped: only the field looks so


def document_of(leg: msgspec.Struct) -> Document:
    """The leg's JSON, to be sent piece after piece. They are not to be changed until then."""
    if not isinstance(leg, PrefillLeg):
        return (encode_json(leg),)
    prompt = memoryview(leg.prompt)
    if prompt.nbytes < LONG_PROMPT_BYTES:
        return (encode_json(leg),)
    document = encode_json(structs.replace(leg, prompt=_MARK))
    mark = document.index(_MARKED) + len(_MARKED) - 2
    return document[:mark], prompt, document[mark + 1 :]
