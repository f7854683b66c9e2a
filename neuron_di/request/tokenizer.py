"""Text to token ids and back, exactly as the model's own tokenizer.json says."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.decoders import Sequence as DecoderSequence

from neuron_di.config import require_no_pointer
from neuron_di.errors import BadRequest, CheckpointError
from neuron_di.request.chat_template import ChatExtras, ChatTemplate
from neuron_di.request.template_traits import template_traits

# Several words, and characters of two and of four bytes, for which few have a token of their own.
_SAMPLE = "Streams are made of pieces. A naïve 𓂀 comes in several."

_NAMED_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class Tokenizer:
    """One model's tokenizer and chat template. Any thread may use it.

    A token is a piece of *bytes*: half a character is a legal token, and a text is the bytes of
    its tokens, decoded as UTF-8 with U+FFFD for what is not. For byte-level BPE (Llama 3, Qwen,
    Mistral Nemo) that is the library's own decode in every case. For SentencePiece-like ones
    (Llama 2, Mistral) the library draws U+FFFD for a whole run of byte tokens when one byte of it
    is wrong, which no stream can follow; here the good characters of such a run stay.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token: str | None = None,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """`tool_template` is for chats with tools, where the model has one of their own."""
        # The file may ask for truncation or padding, which are for training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self.eos_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        self.num_vocab: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        # Tags are read by whoever takes an answer apart, also where they are special.
        tags = template_traits(self.chat_template_source).tags
        self._hidden_ids = self._special_ids - {backend.token_to_id(tag) for tag in tags}
        self._is_byte_level = _is_byte_level(backend)
        self._byte_of_id = {} if self._is_byte_level else _byte_tokens(backend)
        self._anchor = [] if self._is_byte_level else self._find_anchor()
        self._bytes_of_id: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a folder in Hugging Face layout. Raises CheckpointError, naming the file."""
        backend = _read_backend(folder / "tokenizer.json")
        config = _read_config(folder / "tokenizer_config.json")
        older: dict[str, Any] = {}  # where special tokens stood before
        added = config.get("added_tokens_decoder")
        if added is None:
            older = _read_config(folder / "special_tokens_map.json")
            added = list(_read_config(folder / "added_tokens.json"))  # its keys are the texts
        _require_known_tokens(backend, config, added, folder)
        special_tokens = {
            name: text
            for name in _NAMED_SPECIAL_TOKENS
            if (text := _token_content(config.get(name) or older.get(name))) is not None
        }
        chat_template, tool_template = (
            _read_chat_template(folder, config, name, file, special_tokens)
            for name, file in _TEMPLATES
        )
        tokenizer = cls(
            backend,
            eos_token=special_tokens.get("eos_token"),
            chat_template=chat_template,
            tool_template=tool_template,
        )
        tokenizer._check_decoder(folder / "tokenizer.json")
        return tokenizer

    def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """The ids of a text, by default with the special tokens the model wants around it.

        Raises BadRequest, which names `param`, when the text is not valid Unicode.
        """
        try:
            # For one text, too: the library's `encode` holds the interpreter lock all the while.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            # JSON can spell half of a surrogate pair; the library calls it "not a string".
            raise BadRequest(f"{param} holds text that is not valid Unicode", param=param) from None
        ids: list[int] = batch[0].ids
        return ids

    @cached_property
    def token_bytes_max(self) -> int:
        """Bytes of the longest token. A text of n bytes has at least n / so many tokens.

        Only a tokenizer that drops or shortens what it reads can need fewer.
        """
        return max(len(self.token_bytes(token_id)) for token_id in range(self.num_vocab))

    def render_chat(self, messages: Any, extras: ChatExtras | None = None) -> str:
        """The text of a chat; `messages` is the client's JSON. The special tokens are in it.

        Raises BadRequest, which names a field, or TooLarge.
        """
        if self._chat_template is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        template = self._tool_template if extras is not None and extras.tools else None
        return (template or self._chat_template).render(messages, extras)

    def check_tools(self, tools: Any) -> None:
        """Raise BadRequest where the chat template takes no tools, and these are some."""
        if self._tool_template is not None:
            self._tool_template.check_taken("tools", tools)

    @property
    def chat_template_source(self) -> str | None:
        """Of one template after the other, where there are two."""
        templates = {self._chat_template: None, self._tool_template: None}
        return "\n".join(each.source for each in templates if each is not None) or None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some ids. Ids outside the vocabulary have none."""
        pieces: list[bytes] = []
        at_start = True
        for token_id in ids:
            if self.has_text(token_id, skip_special_tokens=skip_special_tokens):
                pieces.append(self.token_bytes(token_id, at_start=at_start))
                at_start = False
        return b"".join(pieces).decode("utf-8", "replace")

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """False when an output passes over this token. It never does over the template's tags."""
        if skip_special_tokens and token_id in self._hidden_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        r"""One token for people: bytes that are no whole character read like `\xe2`."""
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def token_piece(self, token_id: int) -> str | None:
        """One token as tokenizer.json spells it; None outside the vocabulary."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:
        """What one token adds to a text; b"" outside the vocabulary.

        `at_start`: the text begins with it. Some tokenizers then drop a space.
        """
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return _bytes_of_byte_level(piece)
        if at_start:
            return self._bytes_at_start(token_id)
        known = self._bytes_of_id.get(token_id)
        if known is None:
            known = self._bytes_of_id[token_id] = self._bytes_after_anchor(token_id)
        return known

    def _check_decoder(self, path: Path) -> None:
        """Refuse a decoder whose text is not that of its tokens one after the other."""
        ids = self.encode(_SAMPLE, add_special_tokens=False)
        expected = self._decode_exactly(ids)
        if "\ufffd" in expected or self.decode(ids, skip_special_tokens=False) == expected:
            return
        kind = type(self._backend.decoder).__name__
        raise CheckpointError(
            f"{path}: its decoder ({kind}) is not supported: it makes another text of tokens that "
            "come together than of each by itself, as a stream needs them"
        )

    def _decode_exactly(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def _bytes_at_start(self, token_id: int) -> bytes:
        text = self._decode_exactly([token_id])
        byte = self._byte_of_id.get(token_id)
        return text.encode() if byte is None or not text else byte

    def _bytes_after_anchor(self, token_id: int) -> bytes:
        byte = self._byte_of_id.get(token_id)
        if byte is not None:
            return byte
        before = len(self._decode_exactly(self._anchor))
        return self._decode_exactly([*self._anchor, token_id])[before:].encode()

    def _find_anchor(self) -> list[int]:
        """A token with plain text: what follows it is decoded as in the middle of a text."""
        for token_id in range(self.num_vocab):
            if token_id in self._special_ids or token_id in self._byte_of_id:
                continue
            if self._decode_exactly([token_id]).isalnum():
                return [token_id]
        return []


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether its decoder is ByteLevel, be it the only one of a sequence."""
    if not isinstance(backend.decoder, DecoderSequence):
        return isinstance(backend.decoder, ByteLevel)
    steps = json.loads(backend.to_str())["decoder"]["decoders"]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The tokens `<0x00>` to `<0xFF>` where they stand for a byte, and not for their own text."""
    probe = backend.token_to_id("<0x41>")
    if probe is None or backend.decode([probe], skip_special_tokens=False) != "A":
        return {}
    found = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    return {token_id: bytes([byte]) for token_id, byte in found if token_id is not None}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _bytes_of_byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:  # an added token, which is spelled in plain text
        return piece.encode()


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    if text is None:
        raise CheckpointError(f"{path} is missing: a model folder needs its tokenizer")
    require_no_pointer(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path} is not a usable tokenizer: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config


# By which name and in which file `transformers` knows them: the second is taken with tools.
_TEMPLATES = (
    ("default", "chat_template.jinja"),
    ("tool_use", "additional_chat_templates/tool_use.jinja"),
)


def _read_chat_template(
    folder: Path, config: dict[str, Any], name: str, file: str, special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """The template file, else the one of this name in tokenizer_config.json."""
    path = folder / file
    source = _read_text(path)
    if source is None:
        path = folder / "tokenizer_config.json"
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            named = (entry for entry in source if isinstance(entry, dict))
            source = next((e.get("template") for e in named if e.get("name") == name), None)
        elif name != "default":
            source = None
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{path}: chat_template must be a string")
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{path} holds a broken chat template: {error}") from None


def _require_known_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], added: Any, folder: Path
) -> None:
    """Refuse a token of which tokenizer.json does not know, as one copied from another model does
    not: transformers adds it, and here a chat's prompt would have its letters in its place."""
    named = [added, *(config.get(f"{kind}_special_tokens") for kind in ("additional", "extra"))]
    for tokens in (each for each in named if isinstance(each, (dict, list))):
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            text = _token_content(token)
            if text is not None and backend.token_to_id(text) is None:
                raise CheckpointError(
                    f"{folder / 'tokenizer.json'} lacks the token {text!r}, which stands among the "
                    "added or special ones of the files beside it: load the tokenizer with "
                    "transformers and save it again (save_pretrained), or remove the token there"
                )


def _read_text(path: Path) -> str | None:
    """None when there is no such file."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _token_content(token: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
