"""One watch of etcd's: a stream that must show that it lives, and from which revision it tells.

An etcd that hangs, or a stream that something on the way has lost, is silent. So whenever nothing
was said for a while the stream is asked for its progress, and must answer.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

from neuron_di.errors import PeerError, PeerGone, PeerRefused, PeerTimeout
from neuron_di.etcd.connection import Connection, metadata_of
from neuron_di.etcd.failures import (
    Failure,
    HistoryGone,
    Mend,
    PermissionDenied,
    failure_of,
    one_line,
    refused_token,
    wants_token,
)
from neuron_di.etcd.key_value import Change, KeyRange, change_of
from neuron_di.etcd.messages import (
    WATCH,
    WatchCreateRequest,
    WatchProgressRequest,
    WatchRequest,
)
from neuron_di.etcd.packages import grpc

QUIET_S = 2.0  # without a word, until progress is asked for
ANSWER_S = 3.0  # an answer to that, or to the first request, must come within this


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """What one message said: changes in order, perhaps none. `revision` is etcd's own by then.

    `is_whole`: no further changes of the last revision follow in another message.
    """

    changes: tuple[Change, ...]
    revision: int
    cluster_id: int
    is_first: bool
    is_whole: bool


async def watch_stream(
    connection: Connection, keys: KeyRange, start_revision: int, *, with_previous: bool = False
) -> AsyncGenerator[WatchBatch, None]:
    """Follow `keys` from a revision on; 0: from now. Says a first, empty batch once it is heard.

    Raises what ended it: PeerGone, PeerTimeout, PermissionDenied, or HistoryGone where the
    revision was compacted. An empty batch comes from time to time when nothing happens. Where a
    token was good once and is not any more, it is PeerGone: the next stream gets a fresh one.
    """
    create = WatchCreateRequest(
        key=keys.first,
        range_end=keys.end,
        start_revision=start_revision,
        progress_notify=True,
        prev_kv=with_previous,
        fragment=True,
    )
    is_renewed, was_heard = False, False
    while True:
        endpoint, token = connection.endpoint(), None
        try:
            token = await connection.token(endpoint, ANSWER_S)
            connection.num_attempts += 1
            # A member that has lost its leader must say so, not wait in silence.
            metadata = (*metadata_of(token), ("hasleader", "true"))
            call = endpoint.stub(WATCH)(metadata=metadata)
            try:
                async with aclosing(_batches(call, create, endpoint.address)) as batches:
                    async for batch in batches:
                        was_heard = True  # this token is good
                        yield batch
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            failure = failure_of(error.code(), error.details(), endpoint.address)
        except PeerRefused as error:  # etcd 3.4 says of an expired token that it is not permitted
            failure = Failure(error, Mend.NEW_TOKEN)
        except TimeoutError:
            late = PeerTimeout(f"etcd at {endpoint.address} did not answer in time")
            failure = Failure(late, Mend.ANOTHER_TRY)
        except (grpc.aio.UsageError, asyncio.CancelledError):
            if not connection.was_closed(endpoint):
                raise
            gone = PeerGone(f"the connection to etcd at {endpoint.address} was closed")
            failure = Failure(gone, Mend.ANOTHER_TRY)
        if failure.mend is Mend.NEW_TOKEN and token is not None:
            if was_heard:  # whoever follows goes on where it was: we would say everything again
                connection.forget(token)
                raise PeerGone(f"etcd at {endpoint.address} asks for a fresh token")
            if not is_renewed:
                is_renewed = True
                connection.forget(token)
                continue
        if failure.mend is Mend.ANOTHER_TRY:
            connection.leave(endpoint)
        raise failure.error


async def _batches(call: Any, create: Any, address: str) -> AsyncGenerator[WatchBatch, None]:
    """Raises AioRpcError or TimeoutError when the stream ends, or what the message says."""
    await write(call, WatchRequest(create_request=create))
    reading: asyncio.Task[Any] | None = None
    is_asked = True  # and has to answer
    try:
        while True:
            reading = reading or asyncio.create_task(call.read())
            done, _ = await asyncio.wait([reading], timeout=ANSWER_S if is_asked else QUIET_S)
            if not done and is_asked:
                raise TimeoutError
            if not done:
                await write(call, WatchRequest(progress_request=WatchProgressRequest()))
                is_asked = True
                continue
            message, reading, is_asked = reading.result(), None, False
            if message is grpc.aio.EOF:
                await raise_end(call)
            if message.canceled:
                raise _end_of(message, address)
            yield WatchBatch(
                changes=tuple(map(change_of, message.events)),
                revision=message.header.revision,
                cluster_id=message.header.cluster_id,
                is_first=message.created,
                is_whole=not message.fragment,
            )
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])


def _end_of(message: Any, address: str) -> PeerError:
    """Why etcd ended a watch."""
    if message.compact_revision:
        return HistoryGone(f"etcd has compacted everything before {message.compact_revision}")
    reason = one_line(message.cancel_reason)
    if wants_token(reason):
        return refused_token(reason)
    if "permission denied" in reason:
        return PermissionDenied(
            "etcd refused the watch: permission denied; grant our user a role for the prefix "
            "(docs/etcd.md)"
        )
    return PeerGone(f"etcd at {address} ended the watch: {reason}")


async def write(call: Any, request: Any) -> None:
    """Send one message of a stream; AioRpcError where the stream has ended."""
    try:
        async with asyncio.timeout(ANSWER_S):
            await call.write(request)
    except asyncio.InvalidStateError:  # it has ended already
        await raise_end(call)


async def raise_end(call: Any) -> NoReturn:
    """Raise AioRpcError for a stream that has ended, whatever it says."""
    async with asyncio.timeout(ANSWER_S):
        code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.OK:
        code, details = grpc.StatusCode.UNAVAILABLE, "it ended the stream"
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
