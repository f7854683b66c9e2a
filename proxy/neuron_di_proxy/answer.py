"""Turns the events of a running answer into the bytes of its HTTP response."""

from collections.abc import AsyncGenerator, Sequence

from neuron_di.errors import NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.wire import Finished, Token
from neuron_di_proxy.choices import Events
from neuron_di_proxy.failure import error_body, failure_of
from neuron_di_proxy.openai_response import DONE, Answer
from neuron_di_proxy.receipts import Continued, RequestRecord

_log = get_logger(__name__)


class Answering:
    """Reads the events of all choices and writes their answer, whole or as a stream.

    `records` are the choices' own, by index. A choice that fails fails the answer.
    """

    def __init__(self, events: Events, answer: Answer, records: Sequence[RequestRecord]) -> None:
        self._events = events
        self._answer = answer
        self._records = records
        self._finished: dict[int, Finished] = {}  # by choice

    async def whole(self) -> bytes:
        """The answer as one JSON document. Raises what kept the request from its end."""
        tokens: list[list[Token]] = [[] for _ in self._records]
        while not self._is_complete():
            index, event = await self._events.next()
            if isinstance(event, Finished):
                self._finished[index] = event
            else:
                tokens[index].append(event)
        choices = [(given, self._finished[index]) for index, given in enumerate(tokens)]
        return self._answer.whole(choices, continued_of(self._records))

    async def begin_stream(self) -> AsyncGenerator[bytes, None]:
        """Wait for the first event and return the stream of SSE events that starts with it.

        Raises what kept the request from its first event: the response can still be an error.
        """
        return self._stream(*await self._events.next())

    async def _stream(self, index: int, event: Token | Finished) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                if isinstance(event, Finished):
                    self._finished[index] = event
                    last = self._answer.last_chunk(event, self._records[index].continued(), index)
                    if self._is_complete():
                        yield last + self._answer.usage_chunk(list(self._finished.values())) + DONE
                        return
                    yield last
                else:
                    yield self._answer.chunk(event, index)
                index, event = await self._events.next()
        except Exception as error:
            if not isinstance(error, NeuronDiError):
                _log.exception("internal_error", request=self._records[0].request_id)
            # No DONE, and a choice without a finish reason: the client can tell that this is
            # not the end.
            yield b"data: %b\n\n" % error_body(failure_of(error))

    async def close(self) -> None:
        """Cancel what still runs. A request that is not over by now was given up by its client."""
        await self._events.close()

    def _is_complete(self) -> bool:
        return len(self._finished) == len(self._records)


def continued_of(records: Sequence[RequestRecord]) -> Continued | None:
    """What an answer must say of all its choices' continuations; None when there was none."""
    said = [each for record in records if (each := record.continued()) is not None]
    if not said:
        return None
    return Continued(
        continued=sum(each.continued for each in said),
        grade="exact" if all(each.grade == "exact" for each in said) else "recomputed",
    )
