"""What a host's name means here, within a time: the system's own way of asking has no deadline."""

import socket
from queue import Empty, SimpleQueue
from threading import Thread

RESOLVE_TIMEOUT_S = 3.0

Address = tuple[socket.AddressFamily, str]


class Unresolved(Exception):
    """Raised when a name means no address, or nobody said in time. Its words say which."""


def resolve(host: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> list[Address]:
    """The IP addresses of a host, those to be tried first at the front. Raises Unresolved."""
    answers: SimpleQueue[list[Address] | Unresolved] = SimpleQueue()
    # A daemon: one that never ends keeps nobody from ending.
    Thread(target=_ask, args=(host, answers), daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except Empty:
        raise Unresolved(f"nobody said within {timeout_s:g} s what the name {host} means") from None
    if isinstance(answer, Unresolved):
        raise answer
    return answer


def _ask(host: str, answers: SimpleQueue[list[Address] | Unresolved]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is no name"
        answers.put(Unresolved(f"the name {host} means no address here: {words}"))
        return
    answers.put(list(dict.fromkeys((each[0], str(each[4][0])) for each in found)))
