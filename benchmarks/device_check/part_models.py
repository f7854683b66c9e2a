"""The checkpoints that the parts after it compute with."""

import time
from pathlib import Path

from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from neuron_di.models import ModelSpec


def measure(settings: Settings, record: Record) -> None:
    for shape in settings.shapes:
        start_s = time.perf_counter()
        spec = ModelSpec.from_folder(checkpoint(shape, Path(settings.models)))
        record.note(
            f"{shape}: {spec.num_parameters() / 1e6:,.0f} million parameters, "
            f"{spec.num_layers} layers, hidden {spec.hidden}, {spec.num_heads} heads, "
            f"{spec.num_kv_heads} of KV, in {time.perf_counter() - start_s:.0f} s."
        )
