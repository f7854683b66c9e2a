"""A real etcd, a real proxy, one worker that is well, `good`, and what a test writes to etcd."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from etcd.etcd_kit import Etcd, running_etcd
from openai_kit import Client, eventually
from process_kit import Part, part, run, session_of_many

from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.key_value import KeyRange
from neuron_di.wire import WorkerRecord, encode_json, record_decoder

WORKERS = b"/neuron-di/workers/"
PARAMS = {"max_tokens": 4, "ignore_eos": True}
PUTS_PER_TXN = 1000  # that etcd takes


@dataclass(slots=True)
class Scene:
    etcd: Etcd
    store: EtcdClient  # as whoever may write to etcd has it
    proxy: Part
    client: Client
    model: Path

    async def serves(self) -> None:
        answer = await self.client.ask("hello", **PARAMS)
        assert answer.usage["completion_tokens"] == PARAMS["max_tokens"]
        assert self.proxy.process.returncode is None

    async def record(self) -> WorkerRecord:
        """That of `good`, to be changed."""
        key = KeyRange.prefix(WORKERS + b"both/")
        for item in (await self.store.list_keys(key)).items:
            record = record_decoder.decode(item.value)
            if record.worker_id == "good":
                return record
        raise AssertionError("good is gone")

    async def status(self) -> dict:
        status: dict = await self.client.get("/status")
        return status

    async def until(self, holds: Callable[[dict], bool]) -> dict:
        async def look() -> dict | None:
            status = await self.status()
            return status if holds(status) else None

        return await eventually(look)

    async def shown(self) -> str:
        """What an operator is told."""
        ended = await run("status", "--url", self.client.url)
        assert (ended.code, ended.stderr) == (0, "")
        return ended.stdout

    @asynccontextmanager
    async def stored(self, pairs: Mapping[bytes, bytes]) -> AsyncIterator[None]:
        """These keys in etcd, beside what there is; they are gone afterwards."""
        for key, value in pairs.items():
            await self.store.put(key, value)
        try:
            yield
        finally:
            for key in pairs:
                await self.store.delete(KeyRange(key))


def refusal(status: dict, key: bytes) -> dict | None:
    """What is said of a key, which is given as etcd has it."""
    name = key.removeprefix(b"/neuron-di").decode()
    return next((each for each in status["refused"] if each["key"] == name), None)


def changed(record: WorkerRecord, **changes: object) -> WorkerRecord:
    return record_decoder.decode(
        encode_json({name: getattr(record, name) for name in record.__struct_fields__} | changes)
    )


def key_of(record: WorkerRecord) -> bytes:
    return b"/neuron-di" + record.key().encode()


def worker(model: Path, worker_id: str, *flags: str, role: str = "both"):
    """A real one, started."""
    names = (f"--role={role}", f"--worker-id={worker_id}", "--model-name=m", "--threads=1")
    return part("worker", str(model), *names, *flags)


@asynccontextmanager
async def running_scene(model: Path) -> AsyncIterator[Scene]:
    async with (
        running_etcd(flags=(f"--max-txn-ops={PUTS_PER_TXN}",)) as etcd,
        EtcdClient(etcd.addresses, call_timeout_s=30) as store,
        AsyncExitStack() as stack,
    ):
        there = f"--etcd={etcd.addresses[0]}"
        proxy = await stack.enter_async_context(
            part("proxy", "--port=0", there, "--worker-networks=127.0.0.0/8")
        )
        reading = asyncio.create_task(proxy.process.stderr.read())  # it must not wait for us
        stack.callback(reading.cancel)
        await stack.enter_async_context(worker(model, "good", there))
        session = await stack.enter_async_context(session_of_many())
        scene = Scene(etcd, store, proxy, Client(session, proxy.url, "m"), model)
        await scene.until(lambda status: [each["health"] for each in status["workers"]] == ["up"])
        yield scene
