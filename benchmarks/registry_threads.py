"""A process of the registry benchmark that works as users of etcd3 do: threads, no event loop.

    python -m benchmarks.registry_threads '{"role": "watch", "module": "etcd3", …}'

`module` is etcd3 or something with its names. `poll_s` is the seconds between two looks at all
keys, as AWS's document has it; 0: watch instead. Needs the standard library and that module only.
Whatever a call raises is tried again, and a watch that said an exception is made anew: less care
would leave nothing to be measured after a restart.
"""

import importlib
import json
import random
import sys
import threading
import time
from typing import Any

from benchmarks.registry_seen import (
    PREFIX,
    Changes,
    Seen,
    answer_commands,
    answer_of_announcer,
    answer_of_watcher,
)

RETRY_S = 0.5
BEATS_PER_TTL = 3
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # as workers of several hosts have it


def client_of(settings: dict[str, Any]) -> Any:
    host, port = settings["address"].split(":")
    module = importlib.import_module(settings["module"])
    options = {"grpc_options": OWN_CONNECTION} if settings["module"] == "etcd3" else {}
    return module.client(host=host, port=int(port), timeout=1, **options)


class Announcing:
    """One worker: a lease, its key, and a thread that keeps both."""

    def __init__(self, settings: dict[str, Any], worker: str) -> None:
        self._client = client_of(settings)
        self._ttl_s: int = settings["ttl_s"]
        port = int(worker.rpartition("-")[2])
        record = settings["record"]
        self._record = record | {"worker_id": worker, "api_port": port}
        self._key = f"{PREFIX}/workers/{record['role']}/{record['host']}/{port}"
        self.number = 0
        self.changed = threading.Event()

    def run(self) -> None:
        while True:
            try:
                self._hold_lease()
            except Exception:
                time.sleep(RETRY_S)

    def _hold_lease(self) -> None:
        lease = self._client.lease(self._ttl_s)
        interval_s = self._ttl_s / BEATS_PER_TTL
        beat_s = time.monotonic() + random.random() * interval_s  # workers do not beat together
        announced = -1
        while True:
            self.changed.clear()
            number = self.number
            if number != announced:
                value = json.dumps(self._record | {"num_legs": number})
                self._put(value, lease)
                announced = number
            self.changed.wait(max(0.0, beat_s - time.monotonic()))
            if time.monotonic() >= beat_s:
                if not self._keep(lease):
                    return
                beat_s = time.monotonic() + interval_s

    def _put(self, value: str, lease: Any) -> None:
        """Try until it works: the lease is good for longer than most outages."""
        end_s = time.monotonic() + self._ttl_s
        while True:
            try:
                self._client.put(self._key, value, lease=lease)
                return
            except Exception:
                if time.monotonic() >= end_s:
                    raise
                time.sleep(RETRY_S)

    def _keep(self, lease: Any) -> bool:
        while True:
            try:
                [answer] = self._client.refresh_lease(lease.id)
                return bool(answer.TTL > 0)
            except Exception:
                time.sleep(RETRY_S)


def announce(settings: dict[str, Any]) -> None:
    workers = {name: Announcing(settings, name) for name in settings["workers"]}

    def on_change(name: str) -> None:
        workers[name].number += 1
        workers[name].changed.set()

    def begin() -> None:
        for worker in workers.values():
            threading.Thread(target=worker.run, daemon=True).start()

    changes = Changes(list(workers), on_change)
    answer_commands(lambda command: answer_of_announcer(command, changes, begin))


def note(seen: Seen, value: bytes) -> None:
    record = json.loads(value)
    seen.note(record["worker_id"], record["num_legs"])


def list_all(client: Any, seen: Seen) -> None:
    for value, _ in client.get_prefix(f"{PREFIX}/workers/"):
        note(seen, value)


def poll(client: Any, seen: Seen, poll_s: float) -> None:
    while True:
        try:
            list_all(client, seen)
        except Exception:
            time.sleep(RETRY_S)
            continue
        time.sleep(poll_s)


def follow(client: Any, seen: Seen) -> None:
    while True:
        has_ended = threading.Event()

        def hear(response: Any, has_ended: threading.Event = has_ended) -> None:
            if isinstance(response, Exception):
                has_ended.set()
                return
            for event in response.events:
                if event.value:
                    note(seen, event.value)

        try:
            watch_id = client.add_watch_prefix_callback(f"{PREFIX}/workers/", hear)
            list_all(client, seen)
            has_ended.wait()
            client.cancel_watch(watch_id)
        except Exception:
            time.sleep(RETRY_S)


def watch(settings: dict[str, Any]) -> None:
    client, seen = client_of(settings), Seen()
    if settings["poll_s"]:
        threading.Thread(target=poll, args=(client, seen, settings["poll_s"]), daemon=True).start()
    else:
        threading.Thread(target=follow, args=(client, seen), daemon=True).start()
    answer_commands(lambda command: answer_of_watcher(command, seen))


ROLES = {"announce": announce, "watch": watch}

if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    ROLES[chosen["role"]](chosen)
