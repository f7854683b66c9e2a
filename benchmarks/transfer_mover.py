"""The other process of `benchmarks.transfer_interference`: one transfer, or what it is compared
with, a command.

argv: copy SHAPE                memcpy within this process
argv: count SHAPE               a core at work, in its own caches
argv: HOST PORT ENGINE SHAPE    the measuring end of a pair, its key in the environment
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from neuron_di.transfer_bench.control_link import ControlLink
from neuron_di.transfer_bench.flags import KEY_VARIABLE
from neuron_di.transfer_bench.measuring_end import MeasuringEnd
from neuron_di.transfer_bench.plain_copy import PlainCopy
from neuron_di.transfer_bench.shape import Shape

POOL_BYTES = 256 << 20
COUNTED = 1_000_000  # takes some 20 ms, as a transfer does


def copier() -> Callable[[Shape], Any]:
    copy = PlainCopy(POOL_BYTES)
    return lambda shape: copy.seconds(shape.num_bytes)


def counter() -> Callable[[Shape], Any]:
    return lambda _shape: sum(range(COUNTED))


def receiver(host: str, port: str, engine: str, shape: Shape) -> Callable[[Shape], Any]:
    end = MeasuringEnd(ControlLink.ask(host, int(port), os.environ[KEY_VARIABLE]))
    end.open_pools(shape, POOL_BYTES)
    end.connect(0, engine)
    end.move(0, shape.num_blocks, verify=True)
    return lambda shape: end.move(0, shape.num_blocks, verify=False).transfer_s


def main() -> None:
    shape = Shape.of(sys.argv[-1])
    match sys.argv[1]:
        case "copy":
            move = copier()
        case "count":
            move = counter()
        case _:
            move = receiver(*sys.argv[1:4], shape)
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(move(shape)), flush=True)


if __name__ == "__main__":
    main()
