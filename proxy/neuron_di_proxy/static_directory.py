"""Workers that do not announce themselves: their addresses are given, their records asked for."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Self
from urllib.parse import urlsplit

from msgspec import structs

from neuron_di.errors import RemoteProtocolError
from neuron_di.obs import LimitedLogger
from neuron_di.registry import RefusedRecord, Supervised
from neuron_di.wire import WorkerRecord, status_decoder, status_head_decoder
from neuron_di.wire.announce import STATUS_BYTES_MAX
from neuron_di_proxy.directory import LastWord
from neuron_di_proxy.ticks import look_every
from neuron_di_proxy.worker_http import ask_worker, worker_session

_log = LimitedLogger(__name__)

ASK_INTERVAL_S = 1.0
ASK_TIMEOUT_S = 1.0


class _OtherVersionError(Exception):
    """Raised for a worker that we would understand wrongly, or not at all."""


class StaticDirectory:
    """Asks each worker for its record, again and again, while entered.

    A worker that does not answer is not there; one that restarted has a fresh record. One that
    says by itself how it is, to whoever watches it, is not asked.
    """

    def __init__(self, urls: tuple[str, ...]) -> None:
        # One that does both may be named as a prefill worker and as a decode worker.
        self._urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._workers: dict[str, WorkerRecord] = {}
        self._view: tuple[WorkerRecord, ...] = ()
        self._silent: dict[str, str] = {}  # why each is not there
        self._words: dict[str, WorkerRecord] = {}  # the last one of each, as it was said
        self._last_word: LastWord = lambda _: None
        self._has_silent = asyncio.Event()  # among the workers: ask them
        self._asking = Supervised("static directory", self._ask_all)

    def ask_first(self, last_word: LastWord) -> None:
        """What `last_word` has of a worker need not be asked for."""
        self._last_word = last_word

    def workers(self) -> tuple[WorkerRecord, ...]:
        """Every worker that answered last time, in the order of the addresses.

        The same object until one says something else of itself.
        """
        return self._view

    async def __aenter__(self) -> Self:
        self._session = worker_session()
        await self._asking.__aenter__()
        self._stop_looking = look_every(ASK_INTERVAL_S, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_looking()
        await self._asking.__aexit__()
        await self._session.close()

    def trouble(self) -> str:
        """Why the view may be old; empty while all is well."""
        return self._asking.trouble()

    def refused(self) -> Sequence[RefusedRecord]:
        """Whom the operator named, and who did not answer the last question as it should."""
        return [RefusedRecord(url, "", reason) for url, reason in self._silent.items()]

    def missing(self) -> Sequence[str]:
        """As NamedDirectory says."""
        return [f"a worker that was named is not used: {why}" for why in self._silent.values()]

    def num_ignored_by_fault(self) -> Mapping[str, int]:
        """Nothing: there are no keys."""
        return {}

    async def _ask_all(self) -> None:
        while True:
            self._has_silent.clear()
            silent = [url for url in self._urls if not self._has_heard(url)]
            await asyncio.gather(*(self._ask(url) for url in silent))
            await self._has_silent.wait()

    def _look(self) -> None:
        """As a rule all have said the same again."""
        try:
            is_silent = not all(self._has_heard(url) for url in self._urls)
        except Exception:  # a bug: it is met once more by the task, which is owned
            is_silent = True
        if is_silent:
            self._has_silent.set()

    def _has_heard(self, url: str) -> bool:
        """Take what this very process said by itself, if it did."""
        known = self._workers.get(url)
        word = None if known is None else self._last_word(known)
        if known is None or word is None:
            return False
        if word.record is not self._words.get(url):  # as a rule it says the same again
            self._words[url] = word.record
            self._keep(url, word.record, known.host, known.api_port)
        return True

    async def _ask(self, url: str) -> None:
        # Legs go where the operator said; the worker may know itself by another name.
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                http_status, status = await ask_worker(
                    self._session, f"{url}/status", bytes_max=STATUS_BYTES_MAX
                )
            if http_status != 200:
                raise RemoteProtocolError(f"HTTP status {http_status}")
            record = _record_of(status)
        except _OtherVersionError as error:
            self._miss(url, str(error))
        except (OSError, UnicodeError, RemoteProtocolError) as error:
            self._miss(url, _words(error), "it cannot be reached: ")
        else:
            self._silent.pop(url, None)
            self._keep(url, record, host, port)

    def _miss(self, url: str, reason: str, what: str = "") -> None:
        if url in self._workers:
            self._note(url, None)
            _log.warning("worker_lost", url=url, reason=reason)
        elif what + reason != self._silent.get(url):
            _log.warning("worker_unreachable", url=url, reason=reason)
        self._silent[url] = what + reason

    def _keep(self, url: str, record: WorkerRecord, host: str, port: int) -> None:
        record = structs.replace(record, host=host, api_port=port)
        if record != self._workers.get(url):
            self._note(url, record)

    def _note(self, url: str, record: WorkerRecord | None) -> None:
        if record is None:
            del self._workers[url]
        else:
            self._workers[url] = record
        self._view = tuple(self._workers[each] for each in self._urls if each in self._workers)


def _record_of(status: bytes) -> WorkerRecord:
    """Raises _OtherVersionError, or RemoteProtocolError for what no version says."""
    if words := status_head_decoder.decode(status).record.why_not_understood():
        raise _OtherVersionError(words)
    return status_decoder.decode(status).record


def _words(error: Exception) -> str:
    match error:
        case TimeoutError():
            return f"no answer in {ASK_TIMEOUT_S:g} s"
        case OSError(errno=int(number)) if number > 0:  # asyncio says the address instead
            return os.strerror(number)
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return str(error)
