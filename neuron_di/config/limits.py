"""The deadlines and bounds on what one process waits for or keeps for another.

An operator sets them as flags, variables or TOML keys like any option. What follows from them or
from the protocol (how often a waiting leg says that it lives, how a lost connection is retried)
is a named constant where it is used.
"""

from dataclasses import dataclass
from typing import Literal

from neuron_di.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits on requests, as the proxy keeps them."""

    requests_max: int | None = option(
        "choices of requests that are computed at once, further requests queue",
        default=None,
        default_text="1.25 per slot of the decode workers",
        at_least=1,
        at_most=1 << 20,
    )
    queue_max: int | None = option(
        "HTTP requests that may queue, however many choices each has; one more is answered 503",
        default=None,
        default_text="2 per slot of the decode workers, at least 64",
        at_least=0,
        at_most=1 << 20,
    )
    choices_max: int = option(
        "choices (`n` times prompts) of one request", default=8, at_least=1, at_most=128
    )
    request_timeout_s: float = option(
        "seconds until an unfinished request is ended", default=600.0, at_least=1, at_most=86_400
    )
    queue_timeout_s: float = option(
        "seconds a request may wait for its turn, and then again for workers that can serve it "
        "or have room, before it is answered 503",
        default=30.0,
        at_least=0,
        at_most=86_400,
    )
    idle_timeout_s: float = option(
        "seconds the proxy's connection to a worker may be silent, whatever runs there, before it "
        "is closed and its requests go elsewhere",
        default=15.0,
        at_least=3,
        at_most=86_400,
    )
    stall_timeout_s: float = option(
        "seconds a decode worker that has the KV may take for its next token, then the request "
        "continues on another; not of a worker that does both",
        default=15.0,
        at_least=0.1,
        at_most=86_400,
    )
    send_timeout_s: float = option(
        "seconds a client may leave a full connection unread, then its request is ended",
        default=30.0,
        at_least=0.1,
        at_most=86_400,
    )
    connect_timeout_s: float = option(
        "seconds the proxy waits for a connection to a worker",
        default=2.0,
        at_least=0.1,
        at_most=86_400,
    )
    drain_timeout_s: float = option(
        "seconds that running requests get to finish at shutdown",
        default=60.0,
        at_least=0,
        at_most=86_400,
    )
    retries_max: int = option(
        "further attempts at a request whose first token has not been sent",
        default=2,
        at_least=0,
        at_most=100,
    )
    continuations_max: int = option(
        "further attempts at a request whose stream has begun", default=2, at_least=0, at_most=100
    )
    retry_share: float = option(
        "further attempts allowed per request in the long run; a burst of 100 is free",
        default=0.1,
        at_least=0,
        at_most=100,
    )
    probe_interval_s: float = option(
        "seconds between two probes, over HTTP, of a worker that does not report by itself",
        default=0.5,
        at_least=0.05,
        at_most=86_400,
    )
    freeze_timeout_s: float = option(
        "seconds without a report or an answer until a worker counts as frozen, and its requests "
        "go elsewhere",
        default=2.5,
        at_least=0.1,
        at_most=86_400,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverOptions:
    """Limits between a prefill and a decode worker, and how they talk."""

    kv_lease_s: float = option(
        "seconds a prefill worker keeps a prompt's KV for a decode worker that is silent about it",
        default=30.0,
        at_least=0.05,
        at_most=86_400,
    )
    kv_lease_max_s: float = option(
        "seconds it keeps a prompt's KV at most, however often decode asks for more",
        default=480.0,
        at_least=0.05,
        at_most=86_400,
    )
    heartbeat_s: float = option(
        "seconds between two heartbeats of a decode worker to each prefill worker",
        default=1.0,
        at_least=0.01,
        at_most=86_400,
    )
    peer_silence_s: float = option(
        "seconds of silence on the link between a prefill and a decode worker until each counts "
        "the other as lost",
        default=5.0,
        at_least=0.05,
        at_most=86_400,
    )
    peer_connect_timeout_s: float = option(
        "seconds a worker waits for a connection to another worker",
        default=5.0,
        at_least=0.05,
        at_most=86_400,
    )
    transfer_timeout_s: float = option(
        "seconds a transfer of KV may take, plus its bytes divided by --transfer-bytes-per-s",
        default=5.0,
        at_least=0.01,
        at_most=86_400,
    )
    transfer_bytes_per_s: float = option(
        "bytes per second at which a transfer of KV must move, 100 MB/s unless given: see "
        "--transfer-timeout-s",
        default=100e6,
        at_least=1,
    )
    quarantine_s: float = option(
        "seconds recalled KV is kept for a reader that does not let go, before it is reused",
        default=15.0,
        at_least=0.01,
        at_most=86_400,
    )
    peers_max: int = option(
        "decode workers that a prefill worker talks to at once", default=256, at_least=1
    )
    signal_curve: Literal["auto", "off"] = option(
        "whether workers encrypt what they say to each other and know each other by their keys "
        "(CURVE); auto does where libzmq can",
        default="auto",
    )
    stream_layers: Literal["auto", "on", "off"] = option(
        "whether a prompt's KV leaves layer by layer while the prefill still computes; auto does "
        "so over tcp and nixl, where a layer of a chunk has 1 MiB or more: the second token then "
        "follows the first sooner, and the first comes up to 9 per cent later",
        default="auto",
    )
    remembered_max: int = option(
        "ended requests that a worker still knows, and early look-ups that it keeps",
        default=4096,
        at_least=16,
    )

    def transfer_deadline_s(self, num_bytes: int) -> float:
        """Seconds that a transfer of this many bytes may take."""
        return self.transfer_timeout_s + num_bytes / self.transfer_bytes_per_s
