"""A decode worker is killed while the simulated devices move KV to it."""

import os
import signal
from pathlib import Path

from openai_kit import eventually
from serving_kit import Serving

SENT = '"call": "nrt_async_sendrecv_send_tensor"'


async def until_tried(serving: Serving) -> None:
    """Wait until every decode worker has tried out nrt with its peers, and the proxy each pair, and
    nothing moves."""

    async def tried() -> bool | None:
        load = await serving.client.load()
        decoding = [status for name, status in load.items() if name.startswith("decode-")]
        lanes = [status["lanes"] if status else [] for status in decoding]
        return all(each and each[0]["engine"] == "nrt" for each in lanes) or None

    await eventually(tried)
    names = await serving.client.load()
    num_decode = sum(name.startswith("decode-") for name in names)
    await serving.client.until_tested(num_decode * (len(names) - num_decode))


async def kill_who_receives(trace: Path, serving: Serving) -> str:
    """Kill the decode worker to whose device bytes are on their way; its name.

    `trace` is what the devices were told since they were opened. Ask after `until_tried` only:
    what is sent to try out a pair would be taken for a request's KV.
    """
    num_before = _num_sent(trace)

    async def receiver() -> str | None:
        load = await serving.client.load()
        names = [name for name, status in load.items() if status and status["num_transferring"]]
        decoding = [name for name in names if name.startswith("decode-")]
        is_sent = _num_sent(trace) > num_before
        return decoding[0] if decoding and is_sent else None

    name = await eventually(receiver)
    os.kill(serving.pids[name], signal.SIGKILL)
    return name


def _num_sent(trace: Path) -> int:
    return trace.read_text(encoding="utf-8").count(SENT)
