"""A tenant: whoever is accounted for as one, and what it may take."""

from dataclasses import dataclass, replace

from neuron_di.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant and its limits. None: no limit of its own.

    `weight` is its share where tenants compete: with twice the weight, twice the tokens, counted
    as `ClientRequest.cost` does.
    """

    name: str
    weight: float = 1.0
    requests_max: int | None = None  # at once, waiting ones included
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers, counted when an answer ends
    max_tokens: int | None = None  # of one answer
    is_operator: bool = False  # may see the state of the server, which shows all tenants

    @property
    def cache_scope(self) -> str:
        """What its requests may share KV under, and nobody else's. "" where no keys are set."""
        return "" if self is EVERYBODY else self.name

    def cap_tokens(self, max_tokens: int | None, *, is_asked: bool, param: str) -> int | None:
        """How long an answer may be for which `max_tokens` are asked, or else the default.

        `param` is the client's field for it.
        Raises BadRequest when more are asked for than the tenant may have.
        """
        if self.max_tokens is None:
            return max_tokens
        if max_tokens is None or not is_asked:
            return self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        if max_tokens > self.max_tokens:
            raise BadRequest(
                f"this API key allows answers of at most {self.max_tokens} tokens",
                param=param,
            )
        return max_tokens

    def part(self, num_processes: int) -> "Tenant":
        """What one of several processes may give the tenant, at least one of everything."""
        return replace(
            self,
            requests_max=share_of(self.requests_max, num_processes),
            requests_per_minute=share_of(self.requests_per_minute, num_processes),
            tokens_per_minute=share_of(self.tokens_per_minute, num_processes),
        )


def share_of(whole: int | None, num: int) -> int | None:
    """One of `num` shares, rounded up. None is no limit, and stays one."""
    return None if whole is None else -(-whole // num)


# Whoever can connect, where no keys are set.
EVERYBODY = Tenant(name="everybody", is_operator=True)
# Whoever has not shown a key yet, where there are some.
NOBODY = Tenant(name="")
