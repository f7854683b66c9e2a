"""Where a client's connection is: HTTP/1.1 requests come one after another."""

from enum import Enum


class ConnectionState(Enum):
    """HEAD       wait for a whole head, check it, decide who answers
    BODY       the service has taken the request; its body is on the way
    ANSWERING  a task answers; what the client sends meanwhile waits
    LEAVING    the last response is on its way out; what still comes is dropped
    GONE       there is no connection any more, or hypercorn has it
    """

    HEAD = "head"
    BODY = "body"
    ANSWERING = "answering"
    LEAVING = "leaving"
    GONE = "gone"
