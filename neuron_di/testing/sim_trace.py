"""A run's trace as lines that people read, and that are the same whenever the run is the same."""

from collections.abc import Iterator

from neuron_di.errors import RemoteProtocolError
from neuron_di.testing.sim_cluster import Cluster
from neuron_di.wire import Token
from neuron_di.wire.signal import from_decode_decoder, from_prefill_decoder


def lines_of(cluster: Cluster) -> Iterator[str]:
    """Every event, oldest first; then how each client's request ended."""
    for at_s, kind, *what in cluster.network.trace:
        yield f"{at_s:10.6f}  {kind:13} {_words(kind, what)}"
    for client in cluster.clients:
        failed = "" if client.failed is None else f" {client.failed.code}: {client.failed.message}"
        yield f"{client.name}: {client.outcome} after {client.num_tokens} tokens{failed}"


def about(lines: tuple[str, ...], name: str) -> list[str]:
    """The lines that concern one request, and those that concern everybody."""
    everybody = ("kill", "freeze", "thaw", "start", "cut", "lie", "heal", "ambush")
    return [
        line
        for line in lines
        if f" {name}/" in line or f"{name}:" in line or line[12:].startswith(everybody)
    ]


def _words(kind: str, what: list[object]) -> str:
    if kind == "signal":
        sender, receiver, tag, message = what
        assert isinstance(message, bytes)
        return f"{sender} -> {receiver}: {tag} {_request_of(message)}"
    if kind == "leg":
        place, leg_kind, leg, event = what
        detail = f" {event.index}" if isinstance(event, Token) else ""
        code = getattr(event, "code", "")
        name = f"{getattr(leg, 'request_id', '')}/{getattr(leg, 'attempt', '')}"
        return f"{place} {leg_kind} {name} says {type(event).__name__}{detail} {code}".rstrip()
    return " ".join(
        type(item).__name__ if isinstance(item, Exception) else str(item) for item in what
    )


def _request_of(message: bytes) -> str:
    for decoder in (from_decode_decoder, from_prefill_decoder):
        try:
            decoded: object = decoder.decode(message)
        except RemoteProtocolError:
            continue
        name, attempt = getattr(decoded, "request_id", ""), getattr(decoded, "attempt", "")
        reason = getattr(decoded, "reason", "")
        return f"{name}/{attempt} {reason}".rstrip() if name else f"{reason}"
    return "?"
