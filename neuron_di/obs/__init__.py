"""What a process tells its operator, and its launcher."""

from neuron_di.obs.launch_report import LaunchReport, heard, say
from neuron_di.obs.limited_logger import LimitedLogger
from neuron_di.obs.logging import get_logger, setup_logging

__all__ = [
    "LaunchReport",
    "LimitedLogger",
    "get_logger",
    "heard",
    "say",
    "setup_logging",
]
