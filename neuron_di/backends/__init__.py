"""Devices behind one interface. Each backend is imported only when it is opened."""

from neuron_di.backends.backend import Backend, LayerHook, OnLost
from neuron_di.backends.memory import MemoryPlan, available_memory_bytes, plan_memory
from neuron_di.backends.open_backend import BackendOptions, open_backend

__all__ = [
    "Backend",
    "BackendOptions",
    "LayerHook",
    "MemoryPlan",
    "OnLost",
    "available_memory_bytes",
    "open_backend",
    "plan_memory",
]
