"""What one tenant has in the proxy now, and how much more it may have."""

from typing import TYPE_CHECKING

from neuron_di.errors import RateLimited
from neuron_di_proxy.rate_limit import RateLimit
from neuron_di_proxy.retry_after import DrainRate
from neuron_di_proxy.tenant import Tenant

if TYPE_CHECKING:
    from neuron_di_proxy.admission import Ticket


class TenantAccount:
    """One tenant's open requests and rates. `tenant` has its limits as last read."""

    __slots__ = ("_requests", "_tokens", "num_open", "pending", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.num_open = 0  # tickets that are not closed
        self.pending: dict[Ticket, None] = {}  # those that do not run yet, in the order they came
        self._requests: RateLimit | None = None
        self._tokens: RateLimit | None = None
        self.adopt(tenant)

    def adopt(self, tenant: Tenant) -> None:
        """Go by these limits from now on."""
        self.tenant = tenant
        self._requests = _changed(self._requests, tenant.requests_per_minute)
        self._tokens = _changed(self._tokens, tenant.tokens_per_minute)

    def check(self, drain_rate: DrainRate) -> None:
        """Raise RateLimited if the tenant has its share already."""
        requests_max = self.tenant.requests_max
        if requests_max is not None and self.num_open >= requests_max:
            raise RateLimited(
                f"{self.num_open} requests of this API key's tenant are open, which is its limit",
                retry_after_s=drain_rate.wait_s(1),
            )
        wait_s, used_up = 0.0, ""  # whichever lasts longer: the other would refuse it again
        for limit, kind in ((self._requests, "requests"), (self._tokens, "tokens")):
            if limit is not None and (needed_s := limit.wait_s(1)) > wait_s:
                wait_s, used_up = needed_s, kind
        if used_up:
            raise RateLimited(
                f"this API key has used up its {used_up} per minute", retry_after_s=wait_s
            )

    def count_request(self) -> None:
        if self._requests is not None:
            self._requests.take(1)

    def count_tokens(self, num_tokens: float) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    @property
    def is_at_rest(self) -> bool:
        """Whether it says no more than a new one would."""
        rates = (self._requests, self._tokens)
        return not self.num_open and all(each is None or each.is_full for each in rates)

    def crowding(self, further: int = 0) -> float:
        """How much of the queue it has for its weight, or would have with further requests."""
        return (len(self.pending) + further) / self.tenant.weight


def _changed(limit: RateLimit | None, per_minute: int | None) -> RateLimit | None:
    if per_minute is None:
        return None
    if limit is None:
        return RateLimit(per_minute)
    limit.change(per_minute)
    return limit
