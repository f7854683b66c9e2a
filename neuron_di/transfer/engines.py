"""The transfer engines that a worker offers, by its options. Each is imported only if it is.

On a Neuron device, `auto` offers what there is of: reads of the device's memory (nixl_neuron), from
core to core (nrt), and by way of the host (shm, tcp). What an engine lacks shows in the log, and to
whoever asks with `on_lacking`. On an NVIDIA GPU it is reads of the GPU's memory (cuda_ipc), and tcp
by way of the host.
"""

from collections.abc import Callable
from dataclasses import dataclass

from neuron_di.config import TransferOptions, is_loopback
from neuron_di.errors import ConfigError
from neuron_di.kv import ArenaPool, KvPool, NeuronPool
from neuron_di.kv.device_pool import DevicePool
from neuron_di.obs import get_logger
from neuron_di.transfer.handover_engine import HandoverEngine
from neuron_di.transfer.shm_engine import ShmEngine
from neuron_di.transfer.tcp_engine import TcpEngine
from neuron_di.transfer.transfer_engine import TransferEngine

WhyRefused = Callable[[str, int], str]
OnLacking = Callable[[str, str], object]  # an engine's name, and why it is not offered

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Setting:
    options: TransferOptions
    host: str
    announced_host: str | None
    why_refused: WhyRefused


def make_engines(
    pool: KvPool,
    options: TransferOptions,
    host: str,
    *,
    announced_host: str | None = None,
    why_refused: WhyRefused = lambda _host, _port: "",
    on_lacking: OnLacking = lambda _name, _reason: None,
) -> list[TransferEngine]:
    """The preferred first. ConfigError where one that was named cannot work here.

    `host` is the address to listen on, `announced_host` what others reach it by, if that is
    another; `why_refused` says which addresses of peers are not connected to, and why. `on_lacking`
    is told what would be offered here, were it not for what the reason says.
    """
    setting = _Setting(options, host, announced_host, why_refused)
    engines: list[TransferEngine] = []
    try:
        for name in _auto(pool, setting) if options.is_auto else options.transfer:
            maker = _MAKERS.get(name)
            if maker is None:
                raise ConfigError(f"--transfer {name} is not available here", param="transfer")
            try:
                engines.append(maker(pool, setting))
            except ConfigError as error:
                if not options.is_auto or name not in _DISPENSABLE:
                    raise
                _log.info("transfer_engine_not_offered", engine=name, reason=error.message)
                on_lacking(name, error.message)
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    if isinstance(pool, DevicePool):
        pool.keeps_mirror = any(engine.name in _READ_THE_MIRROR for engine in engines)
    return engines


def _handover(pool: KvPool, setting: _Setting) -> TransferEngine:  # noqa: ARG001
    if not isinstance(pool, ArenaPool):
        raise ConfigError(
            "--transfer handover is for workers that one `neuron-di serve` starts", param="transfer"
        )
    return HandoverEngine(pool)


def _cuda_ipc(pool: KvPool, setting: _Setting) -> TransferEngine:  # noqa: ARG001
    from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine

    return CudaIpcEngine(pool)


def _nrt(pool: KvPool, setting: _Setting) -> TransferEngine:
    from neuron_di.transfer.nrt_engine import NrtEngine

    return NrtEngine(
        pool,
        setting.options,
        host=setting.host,
        announced_host=setting.announced_host,
        why_refused=setting.why_refused,
    )


def _shm(pool: KvPool, setting: _Setting) -> TransferEngine:  # noqa: ARG001
    return ShmEngine(pool)


def _nixl(pool: KvPool, setting: _Setting) -> TransferEngine:
    from neuron_di.transfer.nixl_engine import NixlEngine

    options = setting.options
    if isinstance(pool, NeuronPool) and options.nixl_backend == "LIBFABRIC":
        return _nixl_neuron(pool, setting)  # UCX knows no Neuron memory: it moves the mirror
    return NixlEngine(
        pool, backend=options.nixl_backend, host=options.transfer_host or setting.host
    )


def _nixl_neuron(pool: KvPool, setting: _Setting) -> TransferEngine:  # noqa: ARG001
    from neuron_di.transfer.nixl_neuron_engine import NixlNeuronEngine
    from neuron_di.transfer.nixl_neuron_probe import check_device
    from neuron_di.transfer.nixl_tensors import neuron_pool

    check_device(neuron_pool(pool).device)
    return NixlNeuronEngine(pool)


def _tcp(pool: KvPool, setting: _Setting) -> TransferEngine:
    return TcpEngine(
        pool,
        setting.options,
        host=setting.host,
        announced_host=setting.announced_host,
        why_refused=setting.why_refused,
    )


def _auto(pool: KvPool, setting: _Setting) -> list[str]:
    """What works without being asked for. Workers of one machine have better than TCP."""
    if isinstance(pool, DevicePool):
        # Also on one machine: its containers may share a network and no devices' memory.
        return ["cuda_ipc", "tcp"]
    names = ["shm"]
    if isinstance(pool, ArenaPool):
        names.insert(0, "handover")
    if isinstance(pool, NeuronPool):
        names = ["nixl_neuron", "nrt", *names]
    host = setting.options.transfer_host or setting.announced_host or setting.host
    if not is_loopback(host):
        names.append("tcp")
    return names


# Of auto: what may lack on a machine where the others do.
_DISPENSABLE = frozenset({"cuda_ipc", "nixl_neuron", "nrt"})
# Their readers ask for nothing: what they may read is in the mirror of a GPU's blocks before.
_READ_THE_MIRROR = frozenset({"shm", "nixl"})

_MAKERS: dict[str, Callable[[KvPool, _Setting], TransferEngine]] = {
    "handover": _handover,
    "cuda_ipc": _cuda_ipc,
    "nrt": _nrt,
    "shm": _shm,
    "nixl": _nixl,
    "nixl_neuron": _nixl_neuron,  # nobody names it: as nixl over LIBFABRIC, where there is a device
    "tcp": _tcp,
}
