"""A cluster on one machine that grows, shrinks and changes while requests run.

Everything is done with the commands that an operator would type; each is printed before it runs.
Meanwhile a few clients stream answers all the time, and at the end the script says how many there
were, how many failed, and whether one of them differed by a single character.

    python examples/xpyd/one_host.py                 etcd where it is installed
    python examples/xpyd/one_host.py --registry      the proxy's own registry, nothing to install
"""

import argparse
import asyncio
import re
import shutil
import signal
import sys
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from load import Load

MODEL = Path(__file__).parents[1] / "models" / "tiny-tales"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
AGREE_S = 1.0  # for the load to run with what was changed
COMMAND = (sys.executable, "-m", "neuron_di")


class Part:
    """A process of the cluster while entered; at the end it is asked to stop, and waited for."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    async def __aenter__(self) -> Self:
        """Ready to serve. What it says of itself in its first log lines is `said`."""
        show(*self._arguments)
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND, *self._arguments, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.said = await self._until_ready()
        except BaseException:  # nobody else knows of it yet
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            raise
        self._reader = asyncio.create_task(self._read_on())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            code = await self._process.wait()
        await self._reader
        if code != 0 and error is None:
            raise SystemExit(f"neuron-di {' '.join(self._arguments)} ended with {code}")

    async def _until_ready(self) -> dict[str, str]:
        assert self._process.stderr is not None
        lines: list[str] = []
        while line := (await self._process.stderr.readline()).decode():
            lines.append(line)
            if "event=ready" in line:
                return dict(re.findall(r"(\w+)=(\S+)", line))
        raise SystemExit("".join(lines))

    async def _read_on(self) -> None:
        """Pass warnings on; what is fine is not for this demonstration."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if b"level=error" in line:
                sys.stderr.write(line.decode())


def show(*arguments: str) -> None:
    short = [re.sub(r"^.*/models/", "examples/models/", argument) for argument in arguments]
    print(f"\n$ neuron-di {' '.join(short)}", flush=True)


async def order(*arguments: str) -> None:
    """Run a command to its end. Its exit code says whether it did what it says."""
    show(*arguments)
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments)
    if await process.wait() != 0:
        raise SystemExit(f"neuron-di {arguments[0]} ended with {process.returncode}")


async def until_ready(url: str, num_ready: int) -> None:
    """Wait until the proxy routes to so many workers."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_TIMEOUT_S):
        while True:
            async with session.get(f"{url}/status") as response:
                workers = (await response.json())["workers"]
            if sum(worker["record"]["state"] == "ready" for worker in workers) == num_ready:
                return
            await asyncio.sleep(0.05)


async def main(*, has_etcd: bool) -> int:
    async with AsyncExitStack() as stack:
        found_in = ("--etcd=auto",) if has_etcd else ()
        proxy = await stack.enter_async_context(Part("proxy", "--port=0", *found_in))
        url = proxy.said["url"]
        join = (
            f"--etcd={proxy.said['etcd']}" if has_etcd else f"--registry={proxy.said['registry']}"
        )

        async def worker(role: str, worker_id: str) -> None:
            await stack.enter_async_context(
                Part("worker", str(MODEL), f"--role={role}", f"--worker-id={worker_id}", join)
            )

        await asyncio.gather(worker("prefill", "prefill-0"), worker("decode", "decode-0"))
        await until_ready(url, 2)
        await order("status", f"--url={url}")
        async with Load(url) as load:
            await asyncio.sleep(AGREE_S)
            print("\nOne more decode worker, and one more prefill worker; the load goes on.")
            await asyncio.gather(worker("decode", "decode-1"), worker("prefill", "prefill-1"))
            await until_ready(url, 4)
            await asyncio.sleep(AGREE_S)
            await order("status", f"--url={url}")
            print("\nOne decode worker is to go, and one prefill worker to take its place.")
            await order("drain", "decode-0", f"--url={url}")
            await order("role", "prefill-1", "decode", f"--url={url}")
            await until_ready(url, 3)
            await asyncio.sleep(AGREE_S)
            await order("status", f"--url={url}")
        print(f"\n{load.summary()}", flush=True)
    print("All processes have ended.")
    return 1 if load.num_failed or load.num_different else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--registry", action="store_true", help="the proxy's own registry in place of etcd"
    )
    flags = parser.parse_args()
    has_etcd = shutil.which("etcd") is not None and find_spec("grpc") is not None
    sys.exit(asyncio.run(main(has_etcd=has_etcd and not flags.registry)))
