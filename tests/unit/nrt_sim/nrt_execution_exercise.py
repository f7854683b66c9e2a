"""A script for test_nrt_execution_sanitized.py: uses models and queues, right or wrong.

Arguments: the library, its API, and what to do. Prints "whole" when it comes to its end.
"""

import sys
from ctypes import byref
from pathlib import Path

from nrt_sim import neff
from nrt_sim.plain import SUCCESS, PlainNrt
from nrt_sim.plain_chain import Chain
from nrt_sim.plain_models import PlainModels
from nrt_sim.plain_queues import PlainQueues

SIZES = {
    "num_layers": 2,
    "num_slots": 3,
    "num_heads": 2,
    "max_length": 10,
    "head_elements": 3,
    "vocabulary": 50,
}


def must(holds: bool) -> None:
    """An assert that is one under python -O, too, and whose calls are always made."""
    if not holds:
        raise AssertionError


def everything(models: PlainModels) -> None:
    """Twice, with a close between: what the first turn leaves must not reach into the second."""
    for _ in range(2):
        chain(models, has_transposed_keys=True)
        chain(models, has_transposed_keys=False)
        queues(models)
        models.nrt_close()
        models.open()
    models.nrt_close()


def chain(models: PlainModels, has_transposed_keys: bool) -> None:
    made = Chain(models=models, sizes=SIZES, has_transposed_keys=has_transposed_keys)
    token = made.prefill(2, [1, 2, 3])
    rows = [(2, 3, [token]), (0, 9, [4]), (-1, 0, [])]  # the last place, and an idle row
    status, next_tokens, _ = made.run(rows, 1)
    must(status == SUCCESS)
    must(next_tokens[0] == made.expected.generate([1, 2, 3, token], 1)[0])
    for row in ((3, 0, [1]), (0, 10, [1]), (0, 0, [50])):
        must(made.run([row], 1)[0] != SUCCESS)
    damaged = bytearray(made.container(1, 1))
    for cut in range(0, len(damaged), 101):
        must(models.load_status(bytes(damaged[:cut]) or b"\0") != SUCCESS)


def queues(models: PlainModels) -> None:
    made = PlainQueues(models)
    if models.api == 2:
        made.track()
    tensor, target = models.allocated(4096), models.allocated(4096)
    for round_ in range(200):
        content = bytes([round_ % 256]) * 4096
        write = made.write(tensor, 0, content)
        made.wait(made.scheduled(write))
        made.wait(made.scheduled(made.copy((tensor, 0), (target, 0), 4096)))
        read = made.read(target, 0, 4096)
        must(made.result(read) == SUCCESS)
        must(read.buffer.raw == content)
    model = models.loaded(neff.copy(4096))
    sets = models.tensor_set({"in": tensor}), models.tensor_set({"out": target})
    for _ in range(200):
        must(made.result(made.execute(model, *sets)) == SUCCESS)
    models.nrt_sim_fault(b"queues.run", 1203, 1)
    with models.queues_held():
        for _ in range(10):
            made.execute(model, *sets)
    made.drain()


def forgotten_buffer(models: PlainModels) -> None:
    made, tensor = PlainQueues(models), models.allocated(4096)
    with models.queues_held():
        made.write(tensor, 0, bytes(4096)).buffer = None
    made.drain()


def forgotten_status_slot(models: PlainModels) -> None:
    made, tensor = PlainQueues(models), models.allocated(8)
    with models.queues_held():
        made.write(tensor, 0, bytes(8)).slot = None
    made.drain()


def forgotten_tensor(models: PlainModels) -> None:
    """The tensor stays until the request is over, whoever frees it."""
    made, tensor = PlainQueues(models), models.allocated(8)
    with models.queues_held():
        made.write(tensor, 0, bytes(8))
        models.nrt_tensor_free(byref(tensor))
    made.drain()
    must(models.nrt_sim_violations() == 1)


if __name__ == "__main__":
    library, api, name = sys.argv[1:]
    plain = PlainNrt(Path(library))
    plain.open()
    globals()[name](PlainModels(plain, int(api)))
    sys.stdout.write("whole\n")
