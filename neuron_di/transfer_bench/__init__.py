"""`neuron-di bench-transfer`: how fast KV moves between two processes.

    command ─► measure          shapes and engines in turns, a memcpy before each transfer
            ─► measuring_end    plays the decode worker: posts receives, times, verifies
               control_link     authenticated questions and answers
               serving_end      plays the prefill worker: a second process, here or elsewhere
            ─► report

Importing this loads nothing heavy: `entry` takes the rest when it runs.

Next: neuron_di/transfer_bench/measure.py
"""

from neuron_di.transfer_bench.entry import measure_transfers, run_bench_transfer
from neuron_di.transfer_bench.flags import add_bench_transfer_flags

__all__ = ["add_bench_transfer_flags", "measure_transfers", "run_bench_transfer"]
