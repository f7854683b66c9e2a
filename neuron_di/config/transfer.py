"""How KV moves between workers: by which transfer engines, and what it may become on the way."""

from dataclasses import dataclass
from typing import Literal

from neuron_di.config.option import PORT_MAX, ByteSize, option
from neuron_di.errors import ConfigError

AUTO = "auto"
# The preferred first.
ENGINE_NAMES = ("handover", "cuda_ipc", "nrt", "shm", "nixl", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How KV moves between workers."""

    transfer: tuple[str, ...] = option(
        f"what may move KV to and from other workers, of {', '.join(ENGINE_NAMES)}, the preferred "
        "first; auto is what works here: handover and shm on one machine, between GPUs of one "
        "cuda_ipc, between Neuron devices reads of their memory by NIXL or else nrt, and tcp where "
        "--host can be reached from others",
        default=(AUTO,),
    )
    kv_convert: bool = option(
        "take and give KV of another number format, too, where the other worker says so as well; "
        "tokens then differ as numbers round",
        default=False,
    )
    landing_memory: ByteSize | None = option(
        "memory in which a decode worker takes KV of another layout, such as 1GiB",
        default=None,
        default_text="twice its pool, at most 1GiB, or more where a single prompt may need it",
        at_least=4096,
    )
    transfer_host: str | None = option(
        "address at which decode workers fetch KV over TCP from a prefill worker, and whose "
        "network interface NIXL's UCX uses",
        default=None,
        default_text="as --host",
        form="ADDRESS",
    )
    transfer_port: int = option(
        "port of that address; 0 takes any free one", default=0, at_least=0, at_most=PORT_MAX
    )
    transfer_streams: int = option(
        "connections per pair of workers that large KV is spread over, where it goes by tcp: more "
        "where the network limits each of them",
        default=2,  # measured: on one host nearly twice as fast as 1, and 3 or 4 no faster
        at_least=1,
        at_most=64,
    )
    nrt_control_port: int = option(
        "port on which a prefill worker with a Neuron device agrees with decode workers on what "
        "goes from device to device by the engine nrt; 0 takes any free one",
        default=0,
        at_least=0,
        at_most=PORT_MAX,
    )
    nixl_backend: Literal["UCX", "LIBFABRIC"] = option(
        "what moves KV beneath the engine nixl: UCX, or LIBFABRIC, as for EFA on AWS; both workers "
        "of a pair need the same. With --device neuron LIBFABRIC reads the device's memory, and "
        "UCX its copy in the host's; --transfer auto tries the former, whatever this says",
        default="UCX",
    )
    transfer_tls_cert: str | None = option(
        "certificate chain for TLS between workers, PEM, shown by both ends",
        default=None,
        default_text="KV is authenticated, but readable on the way",
        form="FILE",
    )
    transfer_tls_key: str | None = option(
        "private key of that certificate, PEM", default=None, form="FILE"
    )
    transfer_tls_ca: str | None = option(
        "certificates that sign those of the other workers, PEM", default=None, form="FILE"
    )

    def __post_init__(self) -> None:
        files = (self.transfer_tls_cert, self.transfer_tls_key, self.transfer_tls_ca)
        if any(files) and not all(files):
            raise ConfigError(
                "--transfer-tls-cert, --transfer-tls-key and --transfer-tls-ca go together",
                param="transfer_tls_cert",
            )
        if self.is_auto:
            return
        for name in self.transfer:
            if name not in ENGINE_NAMES:
                raise ConfigError(
                    f"--transfer is auto or a list of {', '.join(ENGINE_NAMES)}, not {name!r}",
                    param="transfer",
                )
        if not self.transfer or len(set(self.transfer)) < len(self.transfer):
            raise ConfigError("--transfer must name each engine once", param="transfer")

    @property
    def is_auto(self) -> bool:
        """Whether nobody chose."""
        return self.transfer == (AUTO,)
