"""Structured output: which tokens an answer may go on with so that its text keeps a grammar.

The parser is llguidance's. A state is a function of the answer's token ids, so a worker that
takes over, or goes on after a failure, feeds it those and is where the other was.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from neuron_di.clock import Deadline
from neuron_di.errors import BadRequest, RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.request.alternatives import Alternative, Alternatives, Compiled
from neuron_di.request.calls_in_text import CallPlaces, CallsInText
from neuron_di.request.free_text import Marker, StartTag
from neuron_di.request.grammar_source import source_of, tools_of
from neuron_di.request.schema_refusal import refusal_of
from neuron_di.request.vocabulary import MaskedRow, Vocabulary
from neuron_di.wire import CallGrammar, Grammar, ToolFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = get_logger(__name__)

COMPILED_MAX = 64  # grammars that are kept; the one that was not used for longest goes first

_SEARCH_S = 0.25  # for the tool at fault, of many: at least one is tried, which may take longer

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

    An answer that may be calls instead has two grammars, and keeps one of them; in one that is
    any text, calls keep theirs.
    """

    def __init__(
        self,
        grammars: Alternatives | CallsInText,
        free_text: _FreeText | None,
        vocabulary: Vocabulary,
        row: MaskedRow,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._grammars = grammars
        self._free_text = free_text  # None: it is over, if there was any
        self._keeps_grammar = True  # so far; a start tag in part may, too
        self._vocabulary = vocabulary
        self._row = row
        stops = [token_id for token_id in stop_token_ids if token_id < vocabulary.num_vocab]
        self._stop_ids = np.array(stops, dtype=np.intp) if stops else None
        self._was_asked = False  # what may come next

    @property
    def param(self) -> str:
        """The field of the client's request that errors name."""
        return self._grammars.param

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
        bitmask = self._grammars.bitmask()
        if (failed := self._grammars.failed) is not None:
            raise _dead_end(failed)
        if bitmask is None:
            return logits_V
        if self._stop_ids is not None and self._grammars.is_accepting:
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
        if self._grammars.take(token_id):
            return not self._vocabulary.eos_token_ids and self._grammars.is_stopped
        failed = self._grammars.failed
        if failed is not None and not _WRONG_TOKEN.match(failed.matcher.get_error()):
            raise _dead_end(failed)
        if was_asked:  # the library offered it: it had no token for what must come
            raise BadRequest(
                "the answer cannot go on: the model has no tokens for what the schema asks here",
                param=self.param,
            )
        raise RemoteProtocolError("a given token id breaks the request's grammar")

    def end_ids(self) -> npt.NDArray[np.intp]:
        """Ids of the tokens that would end the answer now: none before the grammar is complete."""
        is_free = self._free_text is not None and not self._free_text.is_opening
        if is_free or not self._keeps_grammar or not self._grammars.is_accepting:
            return np.empty(0, np.intp)
        eos_ids = np.array(self._vocabulary.eos_token_ids, np.intp)
        return eos_ids if self._stop_ids is None else np.concatenate((eos_ids, self._stop_ids))

    def _is_end(self, token_id: int) -> bool:
        if token_id in self._vocabulary.eos_token_ids:
            return self._grammars.is_accepting
        if self._stop_ids is None or token_id not in self._stop_ids:
            return False
        # A stop token that is text as well ends the answer only where it is no part of it.
        return self._grammars.is_accepting and not self._grammars.can_take(token_id)

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
            self._grammars.begin()
        elif self._keeps_grammar:  # a choice may begin as the tag does
            self._keeps_grammar = self._grammars.can_take(token_id)
            return not self._keeps_grammar or self._grammars.take(token_id)
        return True


def _dead_end(failed: Alternative) -> BadRequest:
    reason = "cannot be satisfied"
    if not failed.matcher.get_error().startswith(_NO_WAY_ON):
        failed.compiled.is_spent, reason = True, "is too complex"
    return BadRequest(
        f"the answer cannot go on: what the schema asks here {reason}", param=failed.param
    )


class GrammarCompiler:
    """Makes states for one model, for one engine. Used by one thread at a time.

    Nothing can stop the library once it compiles. Its own limits and `check_schema` bound that: to
    a second or two for the worst schema that a request may bring. What was compiled is kept.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._row = MaskedRow(vocabulary.num_vocab)
        self._compiled: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
        self._starts: OrderedDict[str, StartTag] = OrderedDict()
        self._ends: OrderedDict[tuple[str, bool], Marker] = OrderedDict()
        self._places: OrderedDict[ToolFormat, CallPlaces] = OrderedDict()
        self.num_compiled = 0

    def state_of(self, grammar: Grammar, stop_token_ids: Sequence[int] = ()) -> GrammarState:
        """A fresh state. Blocks. BadRequest names what of a schema is not supported."""
        free_text = None
        if grammar.reasoning is not None:
            free_text = self._free_text(
                *grammar.reasoning, may_trail=grammar.kind not in ("choice", "regex")
            )
        return GrammarState(
            self._grammars_of(grammar), free_text, self._vocabulary, self._row, stop_token_ids
        )

    def _grammars_of(self, grammar: Grammar) -> Alternatives | CallsInText:
        compiled, calls = self._compiled_of(grammar), grammar.calls
        if calls is None:
            return Alternatives([(compiled, grammar.param)])
        if grammar.kind != "text":
            parts = [(compiled, grammar.param), (self._compiled_of(calls), calls.param)]
            return Alternatives(parts)
        words, tool_format = self._vocabulary, calls.format
        places = _kept(self._places, tool_format, lambda: CallPlaces(tool_format, words))
        return CallsInText(compiled, places, param=calls.param, is_parallel=calls.is_parallel)

    def _compiled_of(self, part: Grammar | CallGrammar) -> Compiled:
        for key in [key for key, known in self._compiled.items() if known.is_spent]:
            del self._compiled[key]  # also of others: each holds a whole lexer's states
        return _kept(self._compiled, _key_of(part), lambda: Compiled(self._compile(part)))

    def _free_text(self, start: str, end: str, *, may_trail: bool) -> _FreeText:
        words = self._vocabulary
        return _FreeText(
            _kept(self._starts, start, lambda: StartTag(start, words)),
            _kept(self._ends, (end, may_trail), lambda: Marker(end, words, may_trail=may_trail)),
        )

    def _compile(self, part: Grammar | CallGrammar) -> "LLMatcher":
        self.num_compiled += 1
        try:
            return self._matcher_of(part)
        except BadRequest as error:
            refusal = error.message
        # A bug, and no worker is to blame: a client's schema led to it, whose words these may be.
        except Exception as error:
            _log.error("grammar_failed", error=type(error).__name__)
            refusal = refusal_of("")
        raise BadRequest(self._refusal_of_tool(part) or refusal, param=part.param)

    def _refusal_of_tool(self, part: Grammar | CallGrammar) -> str | None:
        """The refusal of the first tool that is refused alone, with its name, if one is."""
        deadline = Deadline.after(_SEARCH_S)
        for name, arguments in tools_of(part):
            try:
                self._matcher_of(arguments)
            except Exception as error:
                refusal = error.message if isinstance(error, BadRequest) else refusal_of("")
                return refusal.replace("the schema", f"the schema of the tool {name!r}", 1)
            if deadline.has_passed():
                break
        return None

    def _matcher_of(self, part: Grammar | CallGrammar) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=_ITEMS_MAX,
            initial_lexer_fuel=_LEXER_FUEL_FIRST,
            step_lexer_fuel=_LEXER_FUEL,
            max_lexer_states=_STATES_MAX,
            verbose_errors=False,
        )
        source = source_of(part, self._vocabulary)
        matcher = LLMatcher(self._vocabulary.for_grammars, source.text, log_level=0, limits=limits)
        if matcher.is_error():
            raise BadRequest(source.refusal_of(matcher.get_error()), param=part.param)
        matcher.compute_bitmask()  # a schema that refers to nothing but itself shows now
        if matcher.is_error():
            raise BadRequest(source.refusal_of("Unsatisfiable schema"), param=part.param)
        return matcher


def _key_of(part: Grammar | CallGrammar) -> tuple[str, str]:
    """What was compiled for one field serves another, too."""
    if isinstance(part, CallGrammar):
        return f"{part.format} {part.is_parallel}", part.call_schema
    if part.kind == "text" and part.calls is not None:
        kind, schema = _key_of(part.calls)
        return f"text {kind}", schema
    return part.kind, part.value


def _kept(kept: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    value = kept.get(key)
    if value is None:
        value = kept[key] = make()
        if len(kept) > COMPILED_MAX:
            kept.popitem(last=False)
    else:
        kept.move_to_end(key)
    return value
