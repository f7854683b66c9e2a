"""A server that answers as a proxy would: with what a test says, or not at all."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import msgspec
from worker_record import make_record

from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.status import ProxyStatus, StatusReport, WorkerReport


def record(role: str, number: int, **changes: object) -> WorkerRecord:
    fields: dict[str, object] = {
        "worker_id": WorkerId(f"{role}-{number}"),
        "incarnation": Incarnation(f"{role}-{number}-life"),
        "role": role,
        "pid": 100 + number,
        "model": "m",
    }
    return make_record(**(fields | changes))


def worker(role: str, number: int, health: str = "up", **counts: object) -> WorkerReport:
    fields: dict[str, object] = {
        "num_blocks": 100,
        "num_blocks_free": 100,
        "num_waiting": 0,
        "num_running": 0,
        "num_transferring": 0,
        "num_steps": 5,
    }
    status = WorkerStatus(record=record(role, number), **(fields | counts))  # type: ignore[arg-type]
    return WorkerReport(record=status.record, status=status, health=health)


def report(*workers: WorkerReport) -> StatusReport:
    proxy = ProxyStatus(pid=99, num_running=3, num_admitted=7, is_draining=False)
    return StatusReport(proxy=proxy, workers=list(workers))


def metrics(*, first_token: Histogram, gap: Histogram, num_answer_tokens: int = 0) -> str:
    """What `top` reads of /metrics."""
    lines = ["# TYPE neuron_di_waiting gauge", "neuron_di_waiting 2"]
    lines += ["# TYPE vllm:generation_tokens_total counter"]
    lines += [f'vllm:generation_tokens_total{{model_name="m"}} {num_answer_tokens}']
    for name, histogram in (("time_to_first_token", first_token), ("inter_token_latency", gap)):
        lines.append(f"# TYPE vllm:{name}_seconds histogram")
        lines += [
            f'vllm:{name}_seconds_bucket{{le="{end}",model_name="m"}} {count}'
            for end, count in histogram.buckets()
        ]
    return "".join(f"{line}\n" for line in lines)


class ProxyDouble:
    """Serves while entered, always at the same port; `stop` and `start` in between."""

    def __init__(self) -> None:
        self.status = report()
        self.metrics = ""
        self.key: str | None = None  # whoever gives another gets 401
        self.num_asked = 0
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_status = self.path == "/status"
                double.num_asked += is_status
                given = self.headers.get("authorization")
                is_known = double.key is None or given == f"Bearer {double.key}"
                self.send_response(200 if is_known else 401)
                self.end_headers()
                body = msgspec.json.encode(double.status) if is_status else double.metrics.encode()
                self.wfile.write(body if is_known else b"{}")

            def log_message(self, *_: object) -> None:
                """Not to the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
