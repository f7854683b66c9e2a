"""The process of a rank other than the first: does what the first one says, until that ends.

Started as `python -m neuron_di.backends.rank_main CHANNEL_FD RENDEZVOUS_FD`.
"""

import contextlib
import os
import socket
import sys
import traceback
from pathlib import Path

from neuron_di.backends.rank_group import RankGroup
from neuron_di.backends.rank_messages import (
    Channel,
    ClosePool,
    Connect,
    Connected,
    Failed,
    Loaded,
    OpenPool,
    PoolClosed,
    PoolOpened,
    RunChunk,
    Start,
    order_decoder,
)
from neuron_di.backends.rank_model import RankModel
from neuron_di.errors import ConfigError, LocalProtocolError, NeuronDiError
from neuron_di.kv.rank_pool import open_rank_pool
from neuron_di.models import Shard
from neuron_di_bindings.process import end_with_parent

_SEND_TIMEOUT_S = 5.0


def main(channel_fd: int, rendezvous_fd: int) -> int:
    """Serve until the connection ends. Returns the exit code."""
    channel = Channel(socket.socket(fileno=channel_fd), send_timeout_s=_SEND_TIMEOUT_S)
    try:
        _serve(channel, rendezvous_fd)
    except EOFError:
        return 0
    except BaseException as error:
        with contextlib.suppress(OSError):  # then nobody is there to be told
            channel.send(Failed(reason=_words(error), is_config=isinstance(error, ConfigError)))
        return 1
    raise AssertionError("it serves until the connection ends")


def _serve(channel: Channel, rendezvous_fd: int) -> None:
    start, _ = channel.receive(order_decoder)
    if not isinstance(start, Start):
        raise LocalProtocolError("a rank is started first")
    end_with_parent(start.parent_pid)
    layout = start.layout
    model = RankModel(
        Shard(model=start.spec, num_ranks=layout.num_ranks, rank=start.rank),
        folder=Path(start.folder),
        dtype=layout.dtype,
        num_threads=start.num_threads,
    )
    channel.send(Loaded())
    if not isinstance(channel.receive(order_decoder)[0], Connect):
        raise LocalProtocolError("a rank connects before it does anything else")
    group = RankGroup(start.rank, layout.num_ranks, rendezvous_fd, start.timeout_s)
    channel.send(Connected())
    while True:
        order, fd = channel.receive(order_decoder)
        if isinstance(order, RunChunk):
            model.run(order)
        elif isinstance(order, OpenPool) and fd is not None:
            pool_NLCKSD = open_rank_pool(fd, layout, order.place, start.rank)
            os.close(fd)
            model.bind(pool_NLCKSD, order.num_positions, group.gather)
            del pool_NLCKSD  # so that it is unmapped when the model lets go of it
            channel.send(PoolOpened())
        elif isinstance(order, ClosePool):
            model.unbind()
            channel.send(PoolClosed())
        else:
            raise LocalProtocolError(f"a {type(order).__name__} that is not due")


def _words(error: BaseException) -> str:
    """What happened and where, without the words of what is not ours: they may quote a prompt."""
    if isinstance(error, NeuronDiError):
        return error.message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"


if __name__ == "__main__":
    # At once: gloo's threads may still wait for ranks that are gone.
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
