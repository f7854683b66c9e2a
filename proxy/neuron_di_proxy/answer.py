"""Turns what comes of an answer's choices into the bytes of its HTTP response, as it comes."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

from neuron_di.wire import Finished, Token
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.openai_response import DONE, Answer
from neuron_di_proxy.receipts import Continued, RequestRecord
from neuron_di_proxy.reply import Headers, Reply
from neuron_di_proxy.token_lane import Lane

# What head the response has, once the workers are known: called at the first token or the end.
MakeHeaders = Callable[[], Headers]


class _Writing:
    """What either kind of answer is written of, and to. `records` are the choices', by index."""

    def __init__(
        self,
        answer: Answer,
        records: Sequence[RequestRecord],
        reply: Reply,
        make_headers: MakeHeaders,
    ) -> None:
        self._answer = answer
        self._records = records
        self._reply = reply
        self._make_headers = make_headers
        self._finished: dict[int, Finished] = {}  # by choice


class StreamedAnswer(_Writing):
    """Writes each token the moment it comes."""

    def token(self, index: int, token: Token) -> None:
        reply = self._reply
        chunk = self._answer.chunk(token, index)
        if not reply.has_begun:
            reply.begin(200, self._make_headers(), length=None, first=chunk)
        elif chunk:
            reply.write(chunk)

    def lane(self, index: int, gaps: Histogram) -> Lane | None:
        frame = self._answer.frame(index) if self._reply.has_begun else None
        return self._reply.lane(frame, self._records[index], gaps) if frame else None

    def first_lane(self, index: int, gaps: Histogram) -> Lane | None:
        record = self._records[index]
        if self._reply.has_begun or record.emitted or len(self._records) > 1:
            return None
        frame = self._answer.first_frame(index)
        if frame is None:
            return None
        on_begun = partial(self._answer.note_first, index)
        return self._reply.first_lane(frame, record, gaps, self._make_headers(), on_begun)

    def finished(self, index: int, finished: Finished) -> None:
        if not self._reply.has_begun:
            self._reply.begin(200, self._make_headers(), length=None)
        self._finished[index] = finished
        last = self._answer.last_chunk(finished, self._records[index].continued(), index)
        if len(self._finished) < len(self._records):
            self._reply.write(last)
            return
        all_finished = [self._finished[each] for each in range(len(self._records))]
        self._reply.end(last + self._answer.usage_chunk(all_finished) + DONE)


class WholeAnswer(_Writing):
    """Writes one JSON document when all choices have finished."""

    @cached_property
    def _tokens(self) -> list[list[Token]]:  # by choice
        return [[] for _ in self._records]

    def lane(self, index: int, gaps: Histogram) -> None:  # noqa: ARG002 - the document needs them
        return None

    first_lane = lane

    def token(self, index: int, token: Token) -> None:
        self._tokens[index].append(token)

    def finished(self, index: int, finished: Finished) -> None:
        self._finished[index] = finished
        if len(self._finished) < len(self._records):
            return
        choices = [(given, self._finished[each]) for each, given in enumerate(self._tokens)]
        body = self._answer.whole(choices, continued_of(self._records))
        self._reply.begin(200, self._make_headers(), length=len(body), first=body)
        self._reply.end()


def continued_of(records: Sequence[RequestRecord]) -> Continued | None:
    """What an answer must say of all its choices' continuations; None when there was none."""
    said = [each for record in records if (each := record.continued()) is not None]
    if not said:
        return None
    return Continued(
        continued=sum(each.continued for each in said),
        grade="exact" if all(each.grade == "exact" for each in said) else "recomputed",
    )


def route_headers(records: Sequence[RequestRecord]) -> Headers:
    """Where choice 0 comes from, and what all choices went through.

    Of a stream, as known at its first byte.
    """
    if not records or not records[0].attempts:
        return []
    last = records[0].attempts[-1]
    prefill_id, decode_id = last.route.prefill.worker_id, last.route.decode.worker_id
    route = f"prefill={prefill_id}; decode={decode_id}; attempt={last.number}"
    headers = [("x-neuron-di-route", route)]
    continued = continued_of(records)
    if continued is not None:
        headers.append(("x-neuron-di-continued", str(continued.continued)))
    return headers
