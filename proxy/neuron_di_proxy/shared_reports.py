"""One report per prompt, however many answers to it there are.

A report of a long prompt is large, and takes its time on every hop. Only the first answer to a
prompt asks for one.
"""

from msgspec import structs

from neuron_di.wire import Finished, PromptReport, Token
from neuron_di_proxy.choices import ChoiceSink
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.token_lane import Lane


class SharedReports:
    """A ChoiceSink before another: each choice's token 0 has the report of its prompt.

    What the other answers to a prompt say before its first one waits.
    """

    def __init__(self, sink: ChoiceSink, n: int) -> None:
        self._sink = sink
        self._n = n
        self._reports: dict[int, PromptReport | None] = {}  # by the choice that brought it
        self._waiting: dict[int, list[tuple[int, Token | Finished]]] = {}

    def token(self, index: int, token: Token) -> None:
        first = index - index % self._n
        if index == first:
            self._sink.token(index, token)
            if first not in self._reports:
                self._release(first, token.prompt)
        elif first in self._reports:
            self._pass_on(index, token, self._reports[first])
        else:
            self._waiting.setdefault(first, []).append((index, token))

    def finished(self, index: int, finished: Finished) -> None:
        first = index - index % self._n
        if index != first and first not in self._reports:
            self._waiting.setdefault(first, []).append((index, finished))
            return
        if first not in self._reports:
            self._release(first, None)
        self._sink.finished(index, finished)

    def first_lane(self, *_: object) -> None:
        """There is none: what comes first is the report."""

    def lane(self, index: int, gaps: Histogram) -> Lane | None:
        first = index - index % self._n
        return self._sink.lane(index, gaps) if first in self._reports else None

    def _release(self, first: int, report: PromptReport | None) -> None:
        self._reports[first] = report
        for index, said in self._waiting.pop(first, ()):
            if isinstance(said, Token):
                self._pass_on(index, said, report)
            else:
                self._sink.finished(index, said)

    def _pass_on(self, index: int, token: Token, report: PromptReport | None) -> None:
        if token.index == 0:
            token = structs.replace(token, prompt=report)
        self._sink.token(index, token)
