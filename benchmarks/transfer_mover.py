"""The other process of `benchmarks.transfer_interference`: one transfer, or memcpy, a command.

argv: copy SHAPE                memcpy within this process
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


def copier() -> Callable[[Shape], Any]:
    copy = PlainCopy(POOL_BYTES)
    return lambda shape: copy.seconds(shape.num_bytes)


def receiver(host: str, port: str, engine: str, shape: Shape) -> Callable[[Shape], Any]:
    end = MeasuringEnd(ControlLink.ask(host, int(port), os.environ[KEY_VARIABLE]))
    end.open_pools(shape, POOL_BYTES)
    end.connect(0, engine)
    end.move(0, shape.num_blocks, verify=True)
    return lambda shape: end.move(0, shape.num_blocks, verify=False).transfer_s


def main() -> None:
    shape = Shape.of(sys.argv[-1])
    move = copier() if sys.argv[1] == "copy" else receiver(*sys.argv[1:4], shape)
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(move(shape)), flush=True)


if __name__ == "__main__":
    main()
