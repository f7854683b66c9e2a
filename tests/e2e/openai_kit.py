"""A client for tests: it takes answers apart, and checks of each what must hold of all."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

DEADLINE_S = 100.0

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or the messages of a chat
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`labels` are the tokens, readable, from the logprobs; `pieces` the texts of the chunks."""

    answer_id: str
    text: str
    labels: list[str]
    logprobs: list[float]
    tops: list[dict[str, float]]
    finish_reason: str
    usage: dict[str, int]
    pieces: list[str]


class Refused(Exception):
    """The server answered with an error: its HTTP status (200 within a stream) and document."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status = status
        self.error = error


class Client:
    """One server as its users see it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.session = session
        self.url = url
        self.model = model

    def post(self, prompt: Prompt, *, top: int = 0, **params: Any) -> Any:
        """Open a request: greedy, unless `params` say more. The endpoint follows from the prompt.

        An async context manager that gives the HTTP response; leaving it early disconnects.
        """
        body: dict[str, Any] = {"model": self.model, "temperature": 0, **params}
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            path = "/v1/chat/completions"
            body |= {"messages": prompt, "logprobs": True, "top_logprobs": top}
        else:
            path = "/v1/completions"
            body |= {"prompt": prompt, "logprobs": top}
        return self.session.post(self.url + path, json=body)

    async def ask(self, prompt: Prompt, *, stream: bool = False, **params: Any) -> Answer:
        """The whole answer. Refused when there is none."""
        if stream:
            params |= {"stream": True, "stream_options": {"include_usage": True}}
        async with asyncio.timeout(DEADLINE_S), self.post(prompt, **params) as response:
            body = await response.read()
        if response.status != 200:
            raise Refused(response.status, json.loads(body)["error"])
        return _read_stream(body) if stream else _read_whole(json.loads(body))

    async def get(self, path: str) -> Any:
        async with asyncio.timeout(DEADLINE_S), self.session.get(self.url + path) as response:
            return await response.json()

    async def receipt(self, answer_id: str) -> dict[str, Any]:
        receipt: dict[str, Any] = await self.get(f"/v1/receipts/{answer_id}")
        return receipt

    async def load(self) -> dict[str, dict[str, Any]]:
        """The status of each worker, by its id; None of one that is known to be lost.

        One that was too busy to answer the proxy in time is asked again.
        """

        async def heard() -> dict[str, dict[str, Any]] | None:
            workers = (await self.get("/status"))["workers"]
            is_late = any(
                each["status"] is None and each["health"] not in ("down", "frozen")
                for each in workers
            )
            load = {each["record"]["worker_id"]: each["status"] for each in workers}
            return None if is_late else load

        return await eventually(heard)

    async def until_tested(self, num_pairs: int) -> None:
        """Wait until the proxy has tried out so many pairs, by a request of its own each.

        That takes blocks and steps for a moment, some time after the server is ready.
        """

        async def tested() -> bool | None:
            pairs = (await self.get("/status"))["pairs"]
            return len(pairs) == num_pairs or None

        await eventually(tested)
        await self.until_idle()

    async def until_idle(self) -> dict[str, dict[str, Any]]:
        """Wait until no worker holds a request or a block; returns their status then."""

        async def idle() -> dict[str, dict[str, Any]] | None:
            report = await self.get("/status")
            load = {each["record"]["worker_id"]: each["status"] for each in report["workers"]}
            is_idle = report["proxy"]["num_running"] == 0 and all(map(_is_idle, load.values()))
            return load if is_idle else None

        return await eventually(idle)


async def eventually(check: Callable[[], Awaitable[T | None]]) -> T:
    """Ask again and again until the answer is something. TimeoutError at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await check()
            if found is not None:
                return found
            await asyncio.sleep(0.01)


async def gather(*answers: Awaitable[T], at_once: int = 24) -> list[T]:
    """Await all of them, so many at the same time."""
    places = asyncio.Semaphore(at_once)

    async def one(answer: Awaitable[T]) -> T:
        async with places:
            return await answer

    return await asyncio.gather(*(one(answer) for answer in answers))


def _is_idle(status: dict[str, Any] | None) -> bool:
    return (
        status is not None
        and status["num_blocks_free"] + status["num_blocks_cached"] == status["num_blocks"]
        and not (status["num_waiting"] or status["num_running"] or status["num_transferring"])
    )


def _read_whole(document: dict[str, Any]) -> Answer:
    (choice,) = document["choices"]
    is_chat = document["object"] == "chat.completion"
    text = choice["message"]["content"] if is_chat else choice["text"]
    return _answer(document["id"], [choice], [text], document["usage"])


def _read_stream(body: bytes) -> Answer:
    """One id, one finish reason and it comes last, usage once, one `[DONE]` and nothing after."""
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    if "error" in (last := events[-1].removeprefix("data: ")):
        raise Refused(200, json.loads(last)["error"])
    assert events.pop() == "data: [DONE]"
    documents = [json.loads(event.removeprefix("data: ")) for event in events]
    (answer_id,) = {document["id"] for document in documents}
    assert [bool(document["choices"]) for document in documents[-2:]] == [True, False]
    (usage,) = [document["usage"] for document in documents if document["usage"] is not None]
    assert usage is documents[-1]["usage"]
    choices = [choice for document in documents for choice in document["choices"]]
    assert [choice["finish_reason"] is None for choice in choices[-2:]] == [True, False]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    if documents[0]["object"] == "chat.completion.chunk":
        assert [choice["delta"].get("role") for choice in choices[:2]] == ["assistant", None]
        pieces = [choice["delta"].get("content", "") for choice in choices]
    else:
        pieces = [choice["text"] for choice in choices]
    return _answer(answer_id, choices, pieces, usage)


def _answer(
    answer_id: str, choices: list[dict[str, Any]], pieces: list[str], usage: dict[str, int]
) -> Answer:
    labels: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []
    for found in (choice["logprobs"] for choice in choices if choice["logprobs"]):
        if "content" in found:
            for item in found["content"]:
                assert item["token"] == _label(item["bytes"])
                labels.append(item["token"])
                logprobs.append(item["logprob"])
                tops.append({top["token"]: top["logprob"] for top in item["top_logprobs"]})
        else:
            labels += found["tokens"]
            logprobs += found["token_logprobs"]
            tops += found["top_logprobs"]
    assert usage["completion_tokens"] == len(labels)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Answer(
        answer_id=answer_id,
        text="".join(pieces),
        labels=labels,
        logprobs=logprobs,
        tops=tops,
        finish_reason=choices[-1]["finish_reason"],
        usage=usage,
        pieces=pieces,
    )


def _label(token_bytes: list[int]) -> str:
    return bytes(token_bytes).decode("utf-8", "backslashreplace")
