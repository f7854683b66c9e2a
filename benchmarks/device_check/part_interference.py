"""How much longer a decode step takes while KV arrives in the same process, in turns with quiet.

Two loads: one transfer that begins with each step, which is judged; and transfers back to back,
which keep the memory busy all the time, and which no pair of workers makes for long.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.device_check.companion import Companion
from benchmarks.device_check.device_model import device_model
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.part_decode import batches
from benchmarks.device_check.rates import synchronize
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from benchmarks.transfer_interference import Mover
from neuron_di.transfer_bench.local_end import local_serving_end
from neuron_di.transfer_bench.measuring_end import MeasuringEnd
from neuron_di.transfer_bench.shape import Shape

SHAPES = ("256MiB", "4096x64KiB")  # in one piece, and scattered
_COLUMNS = ["", "quiet, ms", "one transfer a step, ms", "times", "back to back, ms", "times"]

Step = Callable[[], object]


def measure(settings: Settings, record: Record) -> None:
    shape = settings.shapes[-1]
    context, batch = settings.pick(1024, 1024, 20), batches(settings)[1]
    rows: list[list[str]] = []
    with device_model(
        checkpoint(shape, Path(settings.models)),
        device=settings.device,
        dtype="bfloat16",
        num_tokens=batch * (context + 16),
        context_tokens=context + 16,
        decode_batch=batch,
    ) as model:
        decoding = model.decoding(batch, context)
        for name in ("64KiB",) if settings.is_small else SHAPES:
            with ExitStack() as stack:
                move = receiving(settings, Shape.of(name), stack)
                quiet_s, one_s, many_s = take_turns(
                    settings, lambda: model.step(decoding), move, stack
                )
            of = f"{name}, {shape}, batch {batch}"
            one, many = ratio(one_s, quiet_s), ratio(many_s, quiet_s)
            rows.append([of, _ms(quiet_s), _ms(one_s), f"{one:.3f}", _ms(many_s), f"{many:.3f}"])
            record.table("Decode steps while KV arrives", _COLUMNS, rows)
            record.figure("step_while_moving", of, one)
            record.figure("", f"transfers back to back, times as long: {of}", many)


def take_turns(
    settings: Settings, step: Step, move: Step, stack: ExitStack
) -> tuple[list[float], list[float], list[float]]:
    """Of each round the median seconds of a step: quiet, with one transfer, under many."""
    companion, mover = Companion(move), Mover(move)
    stack.callback(mover.end)
    stack.callback(companion.end)
    quiet_s, one_s, many_s = [], [], []
    num_steps = settings.pick(60, 40, 2)
    spell(step, 2, None)
    for _ in range(settings.pick(9, 5, 1)):
        quiet_s.append(spell(step, num_steps, None))
        one_s.append(spell(step, num_steps, companion))
        with mover.running():
            many_s.append(spell(step, num_steps, None))
    return quiet_s, one_s, many_s


def spell(step: Step, num_steps: int, companion: Companion | None) -> float:
    """Median seconds of a step; a transfer begins just before each where there is a companion."""
    durations_s = []
    for _ in range(num_steps):
        if companion is None:
            synchronize()
        else:
            companion.begin()
        start_s = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - start_s)
        if companion is not None:
            companion.wait()
    return median(durations_s)


def ratio(with_s: list[float], without_s: list[float]) -> float:
    """The median of the rounds' own ratios."""
    return median(a / b for a, b in zip(with_s, without_s, strict=True))


def receiving(settings: Settings, shape: Shape, stack: ExitStack) -> Step:
    """What moves KV into this process, out of another one, once a call."""
    is_cuda = settings.device == "cuda"
    end = MeasuringEnd(stack.enter_context(local_serving_end()))
    stack.callback(end.close)
    pool_bytes = settings.pick(1 << 30, 1 << 30, 1 << 20)
    end.open_pools(shape, pool_bytes, "device" if is_cuda else "host")
    end.connect(0, "cuda_ipc" if is_cuda else "shm")
    end.move(0, shape.num_blocks, verify=True)
    return lambda: end.move(0, shape.num_blocks, verify=False)


def _ms(medians_s: list[float]) -> str:
    return f"{median(medians_s) * 1e3:.3f}"
