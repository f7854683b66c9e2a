"""A worker's pool and transfer engine in a process of their own, moved by orders.

    python -m tests.contract.peer_process KIND INCARNATION NUM_BLOCKS LAYOUT ARENA_FD

ARENA_FD is -1 where the kind needs none. One JSON document a line, in both directions: an order,
its answer. Ends with its standard input.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from neuron_di.kv import KvLayout, Runs
from neuron_di.transfer import BlockSource, Receive, Send, TransferEngine
from neuron_di.types import Incarnation
from neuron_di.wire import Region

from .engine_kinds import KINDS
from .numbered_blocks import NumberedBlocks
from .transfer_pair import DECODE, PREFILL, Outcome, fill, one_end, random_bytes, runs_of

_ROOT = Path(__file__).parents[2]
_region_decoder: msgspec.msgpack.Decoder[Region] = msgspec.msgpack.Decoder(Region)


def _to_text(region: Region) -> str:
    return base64.b64encode(msgspec.msgpack.encode(region)).decode()


def _from_text(text: str) -> Region:
    return _region_decoder.decode(base64.b64decode(text))


class PeerProcess:
    """The other process, seen from the test's."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.region = _from_text(self._answer()["region"])

    def accept(self, region: Region, peer: Incarnation = DECODE) -> None:
        """From now on `region` says how this peer reaches it."""
        answer = self._order(order="accept", region=_to_text(region), peer=peer)
        self.region = _from_text(answer["region"])

    def connect(self, region: Region) -> None:
        self._order(order="connect", region=_to_text(region))

    def send(self, receive: Receive, peer: Incarnation = DECODE) -> None:
        """Post the send of this receive. It need not have ended."""
        self._order(order="send", peer=peer, **_to_lists(receive))

    def receive(self, receive: Receive) -> None:
        """Post a receive into the blocks of the same numbers, by the first. It need not end."""
        self._order(order="receive", **_to_lists(receive))

    def promise(self, numbers: Sequence[int]) -> BlockSource:
        """These blocks, computed anew, as it offers them in Ready."""
        answer = self._order(order="promise", numbers=list(numbers))
        return BlockSource(answer["block_ids"], answer["generations"])

    def give_up(self, numbers: Sequence[int]) -> None:
        """And write to them."""
        self._order(order="give up", numbers=list(numbers))

    def stop(self) -> None:
        """It does not run, until `go_on`. Its sockets stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _order(self, **fields: object) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):  # a library may have its say, too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise EOFError("the peer process ended")


@contextmanager
def peer_process(
    kind_name: str,
    layout: KvLayout,
    num_blocks: int,
    incarnation: Incarnation = PREFILL,
    *,
    arena_fd: int | None = None,
) -> Iterator[PeerProcess]:
    """A prefill worker, unless it is named otherwise. Killed at the end, however it is."""
    command = [sys.executable, "-m", __spec__.name, kind_name, incarnation, str(num_blocks)]
    command += [msgspec.json.encode(layout).decode(), str(-1 if arena_fd is None else arena_fd)]
    with subprocess.Popen(
        command,
        env={**os.environ, **KINDS[kind_name].environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=() if arena_fd is None else (arena_fd,),
        cwd=_ROOT if __spec__.name.startswith("tests.") else _ROOT / "tests",
    ) as process:
        try:
            yield PeerProcess(process)
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # an order that was cut off by a kill is in its buffer
                process.stdin.close()


def _to_lists(receive: Receive) -> dict[str, object]:
    runs = receive.runs
    return {
        "tag": receive.tag,
        "block_ids": list(receive.source.block_ids),
        "generations": list(receive.source.generations),
        "exchange": list(receive.block_ids),
        "source_offsets": runs.source_offsets.tolist(),
        "destination_offsets": runs.destination_offsets.tolist(),
        "lengths": runs.lengths.tolist(),
    }


def _carry_out(
    order: dict[str, Any], blocks: NumberedBlocks, engine: TransferEngine
) -> dict[str, object]:
    layout = blocks.pool.layout
    match order["order"]:
        case "accept":
            engine.accept(order["peer"], _from_text(order["region"]), layout)
        case "connect":
            engine.connect(PREFILL, _from_text(order["region"]), layout)
        case "send":
            engine.post_send(order["peer"], _send_of(order))
        case "receive":
            _receive(order, blocks, engine)
        case "promise":
            numbers = order["numbers"]
            blocks.give_up(numbers)
            blocks[numbers] = random_bytes(blocks[:].shape)[numbers]
            source = blocks.promise(numbers)
            return {"block_ids": source.block_ids, "generations": source.generations}
        case "give up":
            blocks.give_up(order["numbers"])
            blocks[order["numbers"]] = 0
    return {}


def _send_of(order: dict[str, Any]) -> Send:
    return Send(
        tag=order["tag"],
        runs=_runs_of(order),
        block_ids=order["block_ids"],
        exchange=order["exchange"],
    )


def _receive(order: dict[str, Any], blocks: NumberedBlocks, engine: TransferEngine) -> None:
    """As a worker does it, to the end."""
    receive = Receive(
        tag=order["tag"],
        runs=_runs_of(order),
        memory=blocks.pool.memory(),
        source=BlockSource(order["block_ids"], order["generations"]),
        block_ids=blocks.ids_of(range(len(order["block_ids"]))),
    )
    blocks.begin(receive.block_ids)
    token = engine.post_receive(PREFILL, receive)
    Outcome(engine, receive, token, lambda _: blocks.end(receive.block_ids))


def _runs_of(order: dict[str, Any]) -> Runs:
    return runs_of(order["source_offsets"], order["destination_offsets"], order["lengths"])


def main() -> None:
    kind_name, incarnation, num_blocks, layout_text, arena_text = sys.argv[1:]
    layout = msgspec.json.decode(layout_text, type=KvLayout)
    kind = KINDS[kind_name]
    arena_fd = int(arena_text) if kind.hands_over else None
    end = one_end(kind, Incarnation(incarnation), layout, int(num_blocks), arena_fd)
    with end as (pool, engine):
        blocks = NumberedBlocks(pool)
        fill(blocks)
        _say(engine, DECODE if incarnation == PREFILL else PREFILL, {})
        for line in sys.stdin:
            order = json.loads(line)
            answer = _carry_out(order, blocks, engine)
            _say(engine, Incarnation(order.get("peer", DECODE)), answer)


def _say(engine: TransferEngine, peer: Incarnation, answer: dict[str, object]) -> None:
    region = _to_text(engine.local_region(peer))
    sys.stdout.write(json.dumps({"region": region, **answer}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
