"""What `neuron-di doctor` looks at, and what for."""

from dataclasses import dataclass, field
from typing import Literal

from neuron_di.config.etcd import EtcdOptions
from neuron_di.config.neuron import libnrt_option
from neuron_di.config.option import PORT_MAX, option
from neuron_di.config.transfer import TransferOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What to check."""

    device: Literal["auto", "cpu", "cuda", "neuron"] = option(
        "what the machine must have, a failure if it is missing; auto looks at what is there",
        default="auto",
    )
    only: tuple[str, ...] = option(
        "groups of checks to run, such as host,etcd", default=(), default_text="all"
    )
    host: str = option(
        "address that the server will listen on", default="127.0.0.1", form="ADDRESS"
    )
    port: int = option(
        "HTTP port that it will listen on; 0 takes any free one",
        default=8000,
        at_least=0,
        at_most=PORT_MAX,
    )
    signal_port: int = option(
        "port that a prefill worker will listen on for decode workers; 0 takes any free one",
        default=0,
        at_least=0,
        at_most=PORT_MAX,
    )
    listen: tuple[str, ...] = option(
        "further addresses that processes will listen on here, such as other workers' ports",
        default=(),
        form="HOST:PORT",
    )
    peer: tuple[str, ...] = option(
        "addresses of other machines that must be reached from here",
        default=(),
        form="HOST:PORT",
    )
    transfer_test: bool = option(
        "move KV between two processes of this machine, and say how fast", default=True
    )
    libnrt: str | None = libnrt_option()
    etcd: EtcdOptions = field(default_factory=EtcdOptions)
    kv_transfer: TransferOptions = field(default_factory=TransferOptions)
