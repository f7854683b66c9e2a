"""The worker process: engine, buffers and HTTP front put together."""

from neuron_di.worker.model import LoadedModel, load_model
from neuron_di.worker.process import run_worker
from neuron_di.worker.worker import Worker, WorkerParts

__all__ = ["LoadedModel", "Worker", "WorkerParts", "load_model", "run_worker"]
