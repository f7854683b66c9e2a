"""Structured output: which tokens an answer may go on with so that its text keeps a grammar.

The parser is llguidance's. A state is a function of the answer's token ids, so a worker that
takes over, or goes on after a failure, feeds it those and is where the other was.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from neuron_di.errors import BadRequest, NeuronDiError, RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.request.free_text import Marker, StartTag
from neuron_di.request.schema_refusal import (
    check_expression,
    check_schema,
    expression_refusal_of,
    refusal_of,
)
from neuron_di.request.vocabulary import MaskedRow, Vocabulary
from neuron_di.wire import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_log = get_logger(__name__)

COMPILED_MAX = 64  # grammars that are kept; the one that was not used for longest goes first

# Between two parts of a document: nothing, a space, or a line break and its indentation. JSON
# allows any number, and a model that falls into writing spaces would never come out of it.
_WHITESPACE = r"\n[\x20\t]{0,32}|\x20"
# Without \\uXXXX, by which a key could be written so that the library takes it for another.
_ESCAPES = 'nrbtf\\"'
_STATES_MAX = 25_000  # of a lexer, 1 to 2 kB each; all answers with one schema share them
# Bound the work of one token, to some tenths of a second at the worst; the library counts so.
_LEXER_FUEL_FIRST, _LEXER_FUEL = 400_000, 50_000
_ITEMS_MAX = 20_000  # more than the alternatives that a value within GRAMMAR_CHARS_MAX can hold

# How the library's errors begin where a token does not follow. All others are limits of its own.
_NO_WAY_ON = "NoExtension"
_WRONG_TOKEN = re.compile("Parser Error: token .* doesn't satisfy|parser stopped in", re.DOTALL)

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class _Compiled:
    """A grammar to be copied for each answer. The copies share one lexer, and its limits.

    `is_spent`, set by any thread: an answer came to them, and so would all others.
    """

    matcher: "LLMatcher"
    is_spent: bool = False


@dataclass(slots=True)
class _FreeText:
    """What may come before the grammar, and how far an answer has come with it.

    It is opening while the start tag may come, or has come in part; else the end tag is due.
    """

    start: StartTag
    end: Marker
    is_opening: bool = True
    begun: bytes = b""  # of the start tag
    tail: bytes = b""  # of the text, which the end tag may have begun in


class GrammarState:
    """Where one answer stands. Belongs to one request, and to the engine's thread with it.

    Where the model may reason first, the answer begins with the start tag or keeps the grammar.
    When the grammar is complete, only EOS or one of the request's stop tokens may follow, and
    they end the answer whatever `ignore_eos` and `min_tokens` say. Where the model has no EOS,
    the answer ends with the token that completes it.
    """

    def __init__(
        self,
        compiled: _Compiled,
        free_text: _FreeText | None,
        vocabulary: Vocabulary,
        row: MaskedRow,
        stop_token_ids: Sequence[int],
        param: str,
    ) -> None:
        self.param = param  # the field of the client's request that errors name
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._free_text = free_text  # None: it is over, if there was any
        self._keeps_grammar = True  # so far; a start tag in part may, too
        self._vocabulary = vocabulary
        self._row = row
        stops = [token_id for token_id in stop_token_ids if token_id < vocabulary.num_vocab]
        self._stop_ids = np.array(stops, dtype=np.intp) if stops else None
        self._was_asked = False  # what may come next

    def begin(self, prompt_ids: Sequence[int], *, in_reasoning: bool = False) -> None:
        """Before the first token. A prompt that ends with the end tag leaves no free text; one
        that ends `in_reasoning` was in the midst of it."""
        if self._free_text is None:
            return
        if in_reasoning:
            self._free_text.is_opening = False
        elif self._free_text.end.ends(prompt_ids):
            self._free_text = None

    def masked(self, logits_V: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The logits with -inf for every token that may not come next, until the next call.

        Raises BadRequest when the grammar became too complex, or cannot be completed.
        """
        self._was_asked = True
        free = self._free_text
        if free is not None and not free.is_opening:
            return self._row.drop(logits_V, free.end.forbidden_after(free.tail))
        also = [] if free is None else [free.start.ids_behind(free.begun)]
        if not self._keeps_grammar:
            return self._row.only(logits_V, also[0])
        bitmask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._dead_end()
        if self._stop_ids is not None and self._matcher.is_accepting():
            also.append(self._stop_ids)
        return self._row.keep(logits_V, bitmask, *also)

    def accept(self, token_id: int) -> bool:
        """Take the answer's next token. True: the grammar is complete, and this was its end.

        Raises BadRequest as `masked` does, and RemoteProtocolError when the token cannot come
        here: somebody else chose it.
        """
        was_asked, self._was_asked = self._was_asked, False
        if self._free_text is not None and self._is_free(self._free_text, token_id):
            return False
        if not self._keeps_grammar:
            raise RemoteProtocolError("a given token id goes on with no start tag")
        if self._is_end(token_id):
            return True
        if self._matcher.consume_token(token_id):
            return not self._vocabulary.eos_token_ids and self._matcher.is_stopped()
        if not _WRONG_TOKEN.match(self._matcher.get_error()):
            raise self._dead_end()
        if was_asked:  # the library offered it: it had no token for what must come
            raise BadRequest(
                "the answer cannot go on: the model has no tokens for what the schema asks here",
                param=self.param,
            )
        raise RemoteProtocolError("a given token id breaks the request's grammar")

    def end_ids(self) -> npt.NDArray[np.intp]:
        """Ids of the tokens that would end the answer now: none before the grammar is complete."""
        is_free = self._free_text is not None and not self._free_text.is_opening
        if is_free or not self._keeps_grammar or not self._matcher.is_accepting():
            return np.empty(0, np.intp)
        eos_ids = np.array(self._vocabulary.eos_token_ids, np.intp)
        return eos_ids if self._stop_ids is None else np.concatenate((eos_ids, self._stop_ids))

    def _dead_end(self) -> BadRequest:
        reason = "cannot be satisfied"
        if not self._matcher.get_error().startswith(_NO_WAY_ON):
            self._compiled.is_spent, reason = True, "is too complex"
        return BadRequest(
            f"the answer cannot go on: what the schema asks here {reason}", param=self.param
        )

    def _is_end(self, token_id: int) -> bool:
        if token_id in self._vocabulary.eos_token_ids:
            return self._matcher.is_accepting()
        if self._stop_ids is None or token_id not in self._stop_ids:
            return False
        # A stop token that is text as well ends the answer only where it is no part of it.
        return self._matcher.is_accepting() and not self._matcher.validate_tokens([token_id])

    def _is_free(self, free: _FreeText, token_id: int) -> bool:
        """Take a token that is no part of the grammar's text. False: it must be one."""
        piece = self._vocabulary.token_bytes[token_id]
        if not free.is_opening:
            text = free.tail + piece
            free.tail = text[max(len(text) - free.end.num_tail, 0) :]
            if free.end.is_in(text):
                self._free_text = None
            return True
        begun = free.begun + piece
        if not piece or not free.start.goes_on(begun):
            self._free_text = None
            return False
        free.begun = begun
        if free.start.is_whole(begun):
            free.is_opening, self._keeps_grammar = False, True
            self._matcher = self._compiled.matcher.deep_copy()
        elif self._keeps_grammar:  # a choice may begin as the tag does
            self._keeps_grammar = self._matcher.validate_tokens([token_id]) == 1
            return not self._keeps_grammar or self._matcher.consume_token(token_id)
        return True


class GrammarCompiler:
    """Makes states for one model, for one engine. Used by one thread at a time.

    Nothing can stop the library once it compiles. Its own limits and `check_schema` bound that: to
    about half a second for the worst schema that a request may bring. What was compiled is kept.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._row = MaskedRow(vocabulary.num_vocab)
        self._compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._starts: OrderedDict[str, StartTag] = OrderedDict()
        self._ends: OrderedDict[tuple[str, bool], Marker] = OrderedDict()
        self._limits: LLParserLimits | None = None
        self.num_compiled = 0

    def state_of(self, grammar: Grammar, stop_token_ids: Sequence[int] = ()) -> GrammarState:
        """A fresh state. Blocks. BadRequest names what of a schema is not supported."""
        free_text = None
        if grammar.reasoning is not None:
            free_text = self._free_text(
                *grammar.reasoning, may_trail=grammar.kind.startswith("json")
            )
        key = (grammar.kind, grammar.value)
        known = self._compiled.get(key)
        if known is not None and known.is_spent:
            del self._compiled[key]
        compiled = _kept(self._compiled, key, lambda: _Compiled(self._compile(grammar)))
        return GrammarState(
            compiled,
            free_text,
            self._vocabulary,
            self._row,
            stop_token_ids,
            grammar.param,
        )

    def _free_text(self, start: str, end: str, *, may_trail: bool) -> _FreeText:
        words = self._vocabulary
        return _FreeText(
            _kept(self._starts, start, lambda: StartTag(start, words)),
            _kept(self._ends, (end, may_trail), lambda: Marker(end, words, may_trail=may_trail)),
        )

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        self.num_compiled += 1
        try:
            return self._matcher_of(grammar)
        except NeuronDiError:
            raise
        # A bug, and no worker is to blame: a client's schema led to it, whose words these may be.
        except Exception as error:
            _log.error("grammar_failed", error=type(error).__name__)
            raise BadRequest(refusal_of(""), param=grammar.param) from None

    def _matcher_of(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=_ITEMS_MAX,
            initial_lexer_fuel=_LEXER_FUEL_FIRST,
            step_lexer_fuel=_LEXER_FUEL,
            max_lexer_states=_STATES_MAX,
            verbose_errors=False,
        )
        refusal = refusal_of
        if grammar.kind == "choice":
            source = LLMatcher.grammar_from_lark(_choice_rule(grammar.value, grammar.param))
        elif grammar.kind == "regex":
            check_expression(grammar.value, param=grammar.param)
            source, refusal = LLMatcher.grammar_from_regex(grammar.value), expression_refusal_of
        else:
            schema = '{"type":"object"}' if grammar.kind == "json_object" else grammar.value
            source = _json_grammar(schema, grammar.param)
        matcher = LLMatcher(self._vocabulary.for_grammars, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise BadRequest(refusal(matcher.get_error()), param=grammar.param)
        matcher.compute_bitmask()  # a schema that refers to nothing but itself shows now
        if matcher.is_error():
            raise BadRequest(refusal("Unsatisfiable schema"), param=grammar.param)
        return matcher


def _json_grammar(schema: str, param: str) -> str:
    from llguidance import LLMatcher

    members = _decoded(schema, param)
    if not isinstance(members, dict):
        raise BadRequest("the schema must be a JSON object", param=param)
    # The library reads options of its own there, such as one that drops what it cannot do.
    if "x-guidance" in members:
        raise BadRequest("the schema must not hold 'x-guidance'", param=param)
    check_schema(members, param=param)
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES},
        )
    except ValueError as error:  # such as one that is nested too deeply
        raise BadRequest(refusal_of(str(error)), param=param) from None


def _choice_rule(value: str, param: str) -> str:
    choices = _decoded(value, param)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise BadRequest("a choice must be a list of strings that are not empty", param=param)
    return "start: " + " | ".join(map(_quoted, choices))


def _quoted(text: str) -> str:
    """As the library's rules spell a text: like JSON, but with an escape for DEL, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _decoded(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("the schema is not valid JSON", param=param) from None


def _kept(kept: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    value = kept.get(key)
    if value is None:
        value = kept[key] = make()
        if len(kept) > COMPILED_MAX:
            kept.popitem(last=False)
    else:
        kept.move_to_end(key)
    return value
