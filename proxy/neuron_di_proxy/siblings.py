"""What the processes of one proxy tell each other, so that any of them can answer for all.

Each listens on a socket of its own in a private folder. A question is one line, the answer its
length in one line and then itself; it is empty for what is not known.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from msgspec import structs

from neuron_di.wire import WorkerRecord
from neuron_di_proxy.receipts import Receipt
from neuron_di_proxy.service import Service
from neuron_di_proxy.status import ProxyStatus, StatusReport, report_proxy

ANSWER_TIMEOUT_S = 2.0
QUESTION_BYTES_MAX = 1024
_NO_ANSWER = (OSError, ValueError, EOFError)  # the last two: it died meanwhile. TimeoutError, too

_receipt_decoder = msgspec.json.Decoder(Receipt)
_status_decoder = msgspec.json.Decoder(ProxyStatus)
_workers_decoder = msgspec.json.Decoder(list[WorkerRecord])


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingPlace:
    """Which of how many processes this one is. `folder` is nobody else's to read."""

    folder: str
    index: int
    num_processes: int

    def path_of(self, index: int) -> Path:
        return Path(self.folder) / f"{index}.socket"


class Siblings:
    """Answers the other processes while entered, and asks them. Without a place there are none.

    A process that does not answer in time is left out: it hangs, or is being started again.
    """

    def __init__(self, service: Service, place: SiblingPlace | None) -> None:
        self._service = service
        self._place = place
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        if self._place is not None:
            path = self._place.path_of(self._place.index)
            path.unlink(missing_ok=True)  # a predecessor's
            self._server = await asyncio.start_unix_server(self._serve, path)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    async def metrics(self) -> bytes:
        """The metrics of all processes as one scrape."""
        own = self._service.metrics.text()
        if self._place is None:
            return own
        return join_metrics({self._place.index: own} | await self._ask_all("metrics"))

    async def statuses(self) -> list[ProxyStatus]:
        """How the other processes are."""
        answers = await self._ask_all("status")
        return [_status_decoder.decode(answer) for answer in answers.values()]

    async def completed(self, reporting: Awaitable[StatusReport]) -> StatusReport:
        """This process's report, with how the others are and how many of them do not say so."""
        report, statuses = await asyncio.gather(reporting, self.statuses())
        num_processes = 1 if self._place is None else self._place.num_processes
        num_silent, remarks = num_processes - 1 - len(statuses), report.remarks
        if num_silent:
            words = f"no answer from {num_silent} of this proxy's {num_processes} processes"
            remarks = [*remarks, f"{words}: frozen, or being started again"]
        return structs.replace(report, siblings=statuses, remarks=remarks)

    async def receipt(self, answer_id: str) -> Receipt | None:
        """The receipt of an answer that any process gave; None where none has it."""
        own = self._service.receipts.get(answer_id)
        if own is not None or not answer_id.isascii() or not answer_id.isprintable():
            return own
        answers = await self._ask_all(f"receipt {answer_id}")
        return next((_receipt_decoder.decode(answer) for answer in answers.values()), None)

    async def _ask_all(self, question: str) -> dict[int, bytes]:
        if self._place is None or len(question) >= QUESTION_BYTES_MAX:
            return {}
        return await _ask_others(self._place, question)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                question = (await reader.readline()).decode().strip()
                answer = self._answer(question)
                writer.write(b"%d\n%b" % (len(answer), answer))
                await writer.drain()
        writer.close()

    def _answer(self, question: str) -> bytes:
        service = self._service
        match question.partition(" "):
            case ("metrics", _, _):
                return service.metrics.text()
            case ("status", _, _):
                return msgspec.json.encode(report_proxy(service.admission))
            case ("workers", _, _):
                return msgspec.json.encode(service.directory.workers())
            case ("receipt", _, answer_id):
                receipt = service.receipts.get(answer_id)
                return b"" if receipt is None else msgspec.json.encode(receipt)
        return b""


async def workers_known_to_others(place: SiblingPlace) -> list[WorkerRecord]:
    """Whom the process knows that knows most: one that was started again need not know nobody
    until the registry, which may be away, has answered."""
    answers = await _ask_others(place, "workers")
    known = (_workers_decoder.decode(answer) for answer in answers.values())
    return max(known, key=len, default=[])


async def is_silent(place: SiblingPlace, index: int) -> bool:
    """Whether that process does not answer in time. Who cannot be asked, as where no descriptor
    is left here, is not silent."""
    try:
        await _answer_of(place.path_of(index), "status")
    except TimeoutError:
        return True
    except _NO_ANSWER:
        return False
    return False


async def _ask_others(place: SiblingPlace, question: str) -> dict[int, bytes]:
    """What each other process has to say, by its index."""
    others = [index for index in range(place.num_processes) if index != place.index]
    answers = await asyncio.gather(*(_ask(place.path_of(each), question) for each in others))
    return {index: answer for index, answer in zip(others, answers, strict=True) if answer}


async def _ask(path: Path, question: str) -> bytes:
    try:
        return await _answer_of(path, question)
    except _NO_ANSWER:
        return b""


async def _answer_of(path: Path, question: str) -> bytes:
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(f"{question}\n".encode())
            num_bytes = int(await reader.readline())
            return await reader.readexactly(num_bytes)
        finally:
            writer.close()


def join_metrics(texts: Mapping[int, bytes]) -> bytes:
    """The metrics of all processes, by their index, in Prometheus' text format as each wrote it.

    Each series is kept once per process, with the label `process`. A sum would fall where one of
    them was started again or did not answer, and Prometheus take the rest for new.
    """
    comments: dict[str, list[str]] = {}  # by family, in the order they came first
    series: dict[str, list[str]] = {}
    for index, text in texts.items():
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            if line.startswith("#"):
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            else:
                name, _, value = line.rpartition(" ")
                series.setdefault(family, []).append(f"{_labelled(name, index)} {value}")
    lines = [line for family, about in comments.items() for line in about + series.get(family, [])]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(name: str, index: int) -> str:
    label = f'process="{index}"'
    return f"{name[:-1]},{label}}}" if name.endswith("}") else f"{name}{{{label}}}"
