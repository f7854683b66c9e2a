"""Every option of every command, one set per command.

The help texts are what `--help` prints. A key that several commands share has one type.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_di.config.doctor import DoctorOptions
from neuron_di.config.engine import (
    EngineOptions,
    context_tokens_option,
    decode_batch_option,
    dtype_option,
    rank_count_option,
)
from neuron_di.config.etcd import EtcdOptions
from neuron_di.config.front import FrontOptions
from neuron_di.config.limits import HandOverOptions, LimitOptions
from neuron_di.config.neuron import NeuronOptions
from neuron_di.config.option import PORT_MAX, option
from neuron_di.config.routing import RoutingOptions
from neuron_di.config.transfer import TransferOptions
from neuron_di.config.worker_addresses import WorkerAddressOptions
from neuron_di.errors import ConfigError
from neuron_di.types import WORKER_ID_PATTERN, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What is logged, to stderr."""

    log_level: Literal["debug", "info", "warning", "error"] = option(
        "the least severe lines to log", default="info"
    )
    log_format: Literal["text", "json"] = option(
        "key=value text, or one JSON object per line", default="text"
    )


def _model() -> Any:
    return option("model folder or hub id, in Hugging Face layout", positional=True)


def _model_name() -> Any:
    return option(
        "the name clients use for the model", default=None, default_text="the folder's name"
    )


def _host() -> Any:
    return option("address to listen on", default="127.0.0.1", form="ADDRESS")


def _port(default: int) -> Any:
    return option(
        "HTTP port to listen on; 0 takes any free one",
        default=default,
        at_least=0,
        at_most=PORT_MAX,
    )


def _tp(role: str) -> Any:
    return option(
        f"tensor-parallel ranks of a {role} worker",
        default=None,
        default_text="as --tp",
        at_least=1,
        at_most=64,
    )


def _hang_timeout() -> Any:
    return option(
        "seconds that a worker's step, or a turn of a process' event loop, may take before the "
        "process logs where it hangs and ends; after a fifth of this a step's requests go "
        "elsewhere; none: it may hang",
        default=300.0,
        at_least=1,
        at_most=86_400,
    )


def _parent_pid() -> Any:
    return option("process whose end ends this one", default=None, at_least=1, hidden=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One worker."""

    model: str = _model()
    role: Role = option("what the worker does")
    worker_id: str | None = option(
        "its name, unique among the workers: letters, digits and ._-",
        default=None,
        default_text="one is made up",
    )
    model_name: str | None = _model_name()
    host: str = _host()
    insecure: bool = option(
        "listen on addresses other machines can reach: that network must be trusted, because a "
        "worker asks nobody for a key and encrypts nothing",
        default=False,
    )
    announce_host: str | None = option(
        "the IP address at which others reach this worker",
        default=None,
        default_text="the one it listens on or, where that is 0.0.0.0 or ::, the one that leads "
        "to the registry",
        form="ADDRESS",
    )
    port: int = _port(0)
    signal_port: int = option(
        "port a prefill worker listens on for decode workers; 0 takes any free one",
        default=0,
        at_least=0,
        at_most=PORT_MAX,
    )
    registry: str | None = option(
        "the proxy's registry, where the worker announces itself",
        default=None,
        default_text="it announces itself by --etcd, or not at all",
        form="tcp://HOST:PORT",
    )
    etcd: EtcdOptions = field(default_factory=EtcdOptions)
    static_peer: str | None = option(
        "the only partner of this worker: for decode the signal address HOST:PORT of a prefill "
        "worker, for prefill the id of a decode worker",
        default=None,
        default_text="those that requests name",
    )
    static_peer_key: str | None = option(
        "public key that the only partner must have, as its status shows it",
        default=None,
        default_text="the one that requests name; a prefill worker lets any partner in",
    )
    hand_over: HandOverOptions = field(default_factory=HandOverOptions)
    kv_transfer: TransferOptions = field(default_factory=TransferOptions)
    drain_timeout_s: float = option(
        "seconds that running requests get to finish at shutdown", default=60.0, at_least=0
    )
    hang_timeout_s: float | None = _hang_timeout()
    core: int | None = option(
        "CPU core to pin the worker to, and with --tp those after it",
        default=None,
        default_text="the system chooses",
        at_least=0,
    )
    parent_pid: int | None = _parent_pid()
    num_siblings: int = option(
        "workers that start on this machine at the same time", default=1, at_least=1, hidden=True
    )
    kv_arena_fd: int | None = option(
        "open file in which the pools of several workers lie", default=None, at_least=0, hidden=True
    )
    addresses: WorkerAddressOptions = field(default_factory=WorkerAddressOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        if self.worker_id is not None and not re.fullmatch(WORKER_ID_PATTERN, self.worker_id):
            raise ConfigError(
                "--worker-id must be 1 to 64 letters, digits, dots, dashes or underscores",
                param="worker_id",
            )
        if self.announce_host is not None:
            reason = WorkerAddressOptions().why_refused(self.announce_host, PORT_MAX)
            if reason:
                raise ConfigError(f"--announce-host: {reason}", param="announce_host")
        if self.registry is not None and self.etcd.etcd:
            raise ConfigError("--registry and --etcd are two registries: give one of them")
        if self.etcd.is_auto:
            raise ConfigError(
                "--etcd auto is for `neuron-di serve` and `neuron-di proxy`, which start it: give "
                "a worker the address that they log",
                param="etcd",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyOptions:
    """The proxy."""

    host: str = _host()
    port: int = _port(8000)
    registry_bind: str = option(
        "address at which workers announce themselves; port 0 takes any free one",
        default="tcp://127.0.0.1:0",
        form="tcp://HOST:PORT",
    )
    etcd: EtcdOptions = field(default_factory=EtcdOptions)
    prefill_urls: tuple[str, ...] = option(
        "prefill workers that do not announce themselves", default=(), form="http://HOST:PORT"
    )
    decode_urls: tuple[str, ...] = option(
        "decode workers that do not announce themselves", default=(), form="http://HOST:PORT"
    )
    hang_timeout_s: float | None = _hang_timeout()
    parent_pid: int | None = _parent_pid()
    sibling_index: int = option(
        "which of several proxy processes this is", default=0, at_least=0, hidden=True
    )
    sibling_folder: str | None = option(
        "folder of the processes' own sockets", default=None, form="FOLDER", hidden=True
    )
    sibling_registry: str | None = option(
        "registry of the first process", default=None, form="tcp://HOST:PORT", hidden=True
    )
    front: FrontOptions = field(default_factory=FrontOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    addresses: WorkerAddressOptions = field(default_factory=WorkerAddressOptions)
    log: LogOptions = field(default_factory=LogOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """A proxy and its workers on this machine."""

    model: str = _model()
    prefill: int = option("number of prefill workers", default=1, at_least=1, at_most=64)
    decode: int = option("number of decode workers", default=1, at_least=1, at_most=64)
    prefill_tp: int | None = _tp("prefill")
    decode_tp: int | None = _tp("decode")
    combined: bool = option("instead, one worker that does both prefill and decode", default=False)
    pin: bool = option(
        "give each worker, and each rank of one, a CPU core of its own", default=False
    )
    hang_timeout_s: float | None = _hang_timeout()
    model_name: str | None = _model_name()
    host: str = _host()
    port: int = _port(8000)
    etcd: EtcdOptions = field(default_factory=EtcdOptions)
    hand_over: HandOverOptions = field(default_factory=HandOverOptions)
    kv_transfer: TransferOptions = field(default_factory=TransferOptions)
    front: FrontOptions = field(default_factory=FrontOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    addresses: WorkerAddressOptions = field(default_factory=WorkerAddressOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        split = (self.prefill, self.decode, self.prefill_tp, self.decode_tp)
        if self.combined and split != (1, 1, None, None):
            raise ConfigError(
                "--combined is one worker that does both: --prefill, --decode, --prefill-tp and "
                "--decode-tp go without it",
                param="combined",
            )
        if self.prefill > 1:
            for name in ("transfer_port", "nrt_control_port"):
                if getattr(self.kv_transfer, name):
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(
                        f"{flag} is one port, and each of {self.prefill} prefill workers listens "
                        "on one of its own: go without it, or start them by `neuron-di worker`",
                        param=name,
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What to compile a model for: what is served later must say the same."""

    model: str = _model()
    device: Literal["cpu", "neuron"] = option(
        "what to compile for; cpu is refused, as it runs the checkpoint as it is", default="neuron"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = dtype_option()
    context_tokens: int | None = context_tokens_option()
    decode_batch: int = decode_batch_option()
    tp: int = rank_count_option()
    neuron: NeuronOptions = field(default_factory=NeuronOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def engine(self) -> EngineOptions:
        """As a worker has them."""
        return EngineOptions(
            device=self.device,
            dtype=self.dtype,
            context_tokens=self.context_tokens,
            decode_batch=self.decode_batch,
            tp=self.tp,
            neuron=self.neuron,
        )


# Of a key in several of them the last one says what it is, where no command is asked.
OPTION_SETS: tuple[type, ...] = (DoctorOptions, ServeOptions, ProxyOptions, WorkerOptions)
