"""What a process is told at its start: typed options from flags, environment and a TOML file."""

from neuron_di.config.control_group import available_memory_bytes, usable_cores
from neuron_di.config.cuda import CudaOptions
from neuron_di.config.descriptor_limit import connections_within, raise_descriptor_limit
from neuron_di.config.doctor import DoctorOptions
from neuron_di.config.engine import EngineOptions
from neuron_di.config.environment import child_environment
from neuron_di.config.etcd import EtcdOptions
from neuron_di.config.exposure import cannot_listen, is_loopback, require_address
from neuron_di.config.flag_parser import FlagParser, add_flags, flags_of
from neuron_di.config.front import FrontOptions
from neuron_di.config.limits import HandOverOptions, LimitOptions
from neuron_di.config.load import (
    CONFIG_VARIABLE,
    load_options,
    options_of_values,
    refused_variables,
)
from neuron_di.config.model_folder import local_folder, model_name_of, require_no_pointer
from neuron_di.config.neuron import NeuronOptions
from neuron_di.config.option import ByteSize
from neuron_di.config.options import (
    CompileOptions,
    LogOptions,
    ProxyOptions,
    ServeOptions,
    WorkerOptions,
)
from neuron_di.config.routing import RoutingOptions, RoutingPolicy
from neuron_di.config.thread_limit import require_threads
from neuron_di.config.transfer import TransferOptions
from neuron_di.config.worker_addresses import WorkerAddressOptions

__all__ = [
    "CONFIG_VARIABLE",
    "ByteSize",
    "CompileOptions",
    "CudaOptions",
    "DoctorOptions",
    "EngineOptions",
    "EtcdOptions",
    "FlagParser",
    "FrontOptions",
    "HandOverOptions",
    "LimitOptions",
    "LogOptions",
    "NeuronOptions",
    "ProxyOptions",
    "RoutingOptions",
    "RoutingPolicy",
    "ServeOptions",
    "TransferOptions",
    "WorkerAddressOptions",
    "WorkerOptions",
    "add_flags",
    "available_memory_bytes",
    "cannot_listen",
    "child_environment",
    "connections_within",
    "flags_of",
    "is_loopback",
    "load_options",
    "local_folder",
    "model_name_of",
    "options_of_values",
    "raise_descriptor_limit",
    "refused_variables",
    "require_address",
    "require_no_pointer",
    "require_threads",
    "usable_cores",
]
