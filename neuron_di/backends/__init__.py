"""Devices behind one interface. Each backend is imported only when it is opened."""

from neuron_di.backends.backend import Backend, LayerHook
from neuron_di.backends.memory import MemoryPlan, plan_memory
from neuron_di.backends.open_backend import (
    BackendOptions,
    DevicePlan,
    open_backend,
    plan_device,
)

__all__ = [
    "Backend",
    "BackendOptions",
    "DevicePlan",
    "LayerHook",
    "MemoryPlan",
    "open_backend",
    "plan_device",
    "plan_memory",
]
