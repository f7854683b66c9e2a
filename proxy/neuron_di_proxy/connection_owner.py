"""What a client's connection needs of who accepts connections."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from neuron_di.config import FrontOptions
from neuron_di_proxy.quart_exchange import QuartExchange
from neuron_di_proxy.request_head import RequestHead
from neuron_di_proxy.service import Service

if TYPE_CHECKING:
    from neuron_di_proxy.front_connection import FrontConnection


class ConnectionOwner(Protocol):
    """Who accepts connections."""

    service: Service
    options: FrontOptions
    send_timeout_s: float
    takes_hot: bool
    is_draining: bool

    def joined(self, connection: "FrontConnection") -> bool:
        """A connection was made. False: there are too many, and it must end."""
        ...

    def left(self, connection: "FrontConnection") -> None:
        """A connection is over."""
        ...

    def begins(self, connection: "FrontConnection") -> None:
        """A request's head has come."""
        ...

    def rests(self, connection: "FrontConnection") -> None:
        """Its response is written, and the next request may come."""
        ...

    def let_answer(self, connection: "FrontConnection") -> None:
        """Call `begin_answer` of the connection, now or in its turn."""
        ...

    def hand_over(
        self, connection: "FrontConnection", transport: asyncio.Transport, received: bytes
    ) -> None:
        """Give an HTTP/2 connection and what it has received to hypercorn, for good."""
        ...

    def open_other(self, head: RequestHead, transport: asyncio.Transport) -> QuartExchange:
        """Take a request that Quart answers."""
        ...
