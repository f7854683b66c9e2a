"""The agents through which peers read this worker's memory: one, and then a fresh one.

An agent over LIBFABRIC is connected to 255 times in its life: NIXL numbers who connects with 8
bits, and gives no number back. So connections are counted, and near the limit a fresh agent, under
another name, takes those to come. The old one is closed when the last who was sent there has left.
"""

import math
import threading
from collections.abc import Callable

from neuron_di.errors import ConfigError
from neuron_di.transfer.nixl_agent import NixlAgent

# By backend. A few are left for who connects more often than it was accepted.
CONNECTIONS_MAX: dict[str, float] = {"LIBFABRIC": 250}


class ServingAgents:
    """Owns them. Thread-safe.

    `open_agent` makes one of this name, with the memory registered. ConfigError where it cannot.
    """

    def __init__(self, name: str, open_agent: Callable[[str], NixlAgent]) -> None:
        self._name = name
        self._open_agent = open_agent
        self._lock = threading.Lock()
        self._num_renewed = 0
        self._num_taken = 0  # of the present one's connections
        self._by_client: dict[str, NixlAgent] = {}
        self._is_closed = False
        self.present = open_agent(name)

    def take(self, client: str) -> NixlAgent:
        """Whom this client may connect to, once. ConfigError where no fresh one can be opened."""
        with self._lock:
            if self._is_closed:
                raise ConfigError("NIXL's agents are closed")
            left = {self._by_client.pop(client, self.present), self.present}
            if self._num_taken >= CONNECTIONS_MAX.get(self.present.backend, math.inf):
                self.present = self._open_agent(f"{self._name}-{self._num_renewed + 1}")
                self._num_renewed += 1
                self._num_taken = 0
            self._num_taken += 1
            self._by_client[client] = self.present
            self._close_unused(left)
            return self.present

    def drop(self, client: str) -> None:
        """It does not read any more."""
        with self._lock:
            if (agent := self._by_client.pop(client, None)) is not None:
                self._close_unused({agent})

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            agents = {self.present, *self._by_client.values()}
            self._by_client.clear()
            for agent in agents:
                agent.close()

    def _close_unused(self, agents: set[NixlAgent]) -> None:
        for agent in agents - {self.present, *self._by_client.values()}:
            agent.close()
