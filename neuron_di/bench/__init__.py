"""`neuron-di bench`: a serving benchmark against any OpenAI endpoint.

    command ─► endpoint   what the endpoint is: model, tokens, which fields it takes
            ─► plan       which requests: arrivals, lengths or a trace
            ─► run        sends them; client, outcome and measured keep what came back
            ─► summary    figures; statistics and slo say how they are counted
            ─► report, plot, or JSON of the summary's document

Importing this loads nothing heavy: `command` takes the rest when it runs.

Next: neuron_di/bench/run.py
"""

from neuron_di.bench.command import run_bench_command
from neuron_di.bench.flags import add_bench_flags

__all__ = ["add_bench_flags", "run_bench_command"]
