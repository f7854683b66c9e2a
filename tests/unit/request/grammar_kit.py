"""Grammars over two small tokenizers, and what writes answers in them."""

import json

import numpy as np
import tokenizers
from tokenizer_kit import byte_level_json, make_tokenizer

from neuron_di.request import Tokenizer
from neuron_di.request.grammar import GrammarCompiler
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import Grammar

EOS = 0


class Kit:
    def __init__(self, kind="byte_level", eos=(EOS,)):
        self.tokenizer = make_tokenizer(kind)
        # Rows of logits are often longer than the tokenizer's vocabulary.
        self.vocabulary = Vocabulary(
            self.tokenizer, num_vocab=self.tokenizer.num_vocab + 5, eos_token_ids=eos
        )
        self.compiler = GrammarCompiler(self.vocabulary)
        self.raw_V = np.arange(self.vocabulary.num_vocab, dtype=np.float32)

    def schema(self, schema, reasoning=None, stop_token_ids=()):
        grammar = Grammar(kind="json_schema", value=json.dumps(schema), reasoning=reasoning)
        return self.compiler.state_of(grammar, stop_token_ids)

    def choice(self, *choices, reasoning=None):
        return self.compiler.state_of(
            Grammar(kind="choice", value=json.dumps(choices), reasoning=reasoning)
        )

    def allowed(self, state):
        masked_V = state.masked(self.raw_V)
        is_kept = ~np.isneginf(masked_V)
        if not (masked_V[is_kept] == self.raw_V[is_kept]).all():
            raise AssertionError("the logits that are kept are as they were")
        return set(np.flatnonzero(is_kept).tolist())

    def ids(self, text):
        """Byte by byte: what any tokenizer here can spell at any place."""
        of_byte = {piece: i for i, piece in reversed(list(enumerate(self.vocabulary.token_bytes)))}
        return [of_byte[bytes([byte])] for byte in text.encode()]

    def write(self, state, text):
        """Spell a text with the longest allowed tokens. Where it is forced there is only one."""
        left = text.encode()
        while left:
            fitting = [
                token_id
                for token_id in self.allowed(state)
                if (piece := self.vocabulary.token_bytes[token_id]) and left.startswith(piece)
            ]
            if not fitting:
                raise AssertionError(left)
            chosen = max(fitting, key=lambda token_id: len(self.vocabulary.token_bytes[token_id]))
            if state.accept(chosen):
                raise AssertionError("it ended too soon")
            left = left[len(self.vocabulary.token_bytes[chosen]) :]


def with_special_tokens(*texts):
    """A vocabulary in which each of these is one."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_special_tokens(list(texts))
    tokenizer = Tokenizer(backend)
    return Vocabulary(tokenizer, num_vocab=tokenizer.num_vocab, eos_token_ids=(EOS,))
