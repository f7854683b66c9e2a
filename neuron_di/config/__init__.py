"""What a process is told at its start: typed options from flags, environment and a TOML file."""

from neuron_di.config.exposure import is_loopback
from neuron_di.config.flag_parser import FlagParser, add_flags, flags_of
from neuron_di.config.front import FrontOptions
from neuron_di.config.limits import HandOverOptions, LimitOptions
from neuron_di.config.load import load_options
from neuron_di.config.option import ByteSize
from neuron_di.config.options import (
    EngineOptions,
    LogOptions,
    ProxyOptions,
    ServeOptions,
    WorkerOptions,
)

__all__ = [
    "ByteSize",
    "EngineOptions",
    "FlagParser",
    "FrontOptions",
    "HandOverOptions",
    "LimitOptions",
    "LogOptions",
    "ProxyOptions",
    "ServeOptions",
    "WorkerOptions",
    "add_flags",
    "flags_of",
    "is_loopback",
    "load_options",
]
