"""A registry of a simulation, which can be away.

While it is, every call fails, nothing changes and the watch says nothing. When it is back, its
leases last as long as if they had just been granted: that is what a restarted etcd does, and so
the dead have keys.
"""

from neuron_di.clock import now_s
from neuron_di.config import WorkerAddressOptions
from neuron_di.errors import PeerTimeout
from neuron_di.registry import EmbeddedRegistry, LeaseId


class AnyAddress(WorkerAddressOptions):
    """Simulated workers have no addresses."""

    __slots__ = ()

    def why_refused(self, host: str, port: int) -> str:  # noqa: ARG002 - whatever they are
        return ""


class SimRegistry(EmbeddedRegistry):
    """An embedded registry that is away while `is_away`."""

    def __init__(self) -> None:
        super().__init__(now_s)
        self._away_since_s: float | None = None

    @property
    def is_away(self) -> bool:
        return self._away_since_s is not None

    def go_away(self) -> None:
        self._away_since_s = now_s()

    def come_back(self) -> None:
        """As after a restart: every lease has its full time, whoever it belongs to."""
        if self._away_since_s is not None:
            self.extend_all(now_s() - self._away_since_s)
            self._away_since_s = None

    def trouble(self) -> str:
        return "the registry does not answer" if self.is_away else ""

    def expire(self) -> None:
        if not self.is_away:
            super().expire()

    async def grant(self, ttl_s: float) -> LeaseId:
        self._check()
        return await super().grant(ttl_s)

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        self._check()
        await super().put(key, value, lease)

    async def keep_alive(self, lease: LeaseId) -> float:
        self._check()
        return await super().keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        self._check()
        await super().revoke(lease)

    def _check(self) -> None:
        if self.is_away:
            raise PeerTimeout("the registry does not answer")
