"""`neuron-di bench --self-test`: what a request and a token cost the client itself.

An endpoint in another process sends ready-made answers, one packet per token, at a pace that is not
the client's limit. What the client's process uses is then counted by the system.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from rich.console import Console

from neuron_di.bench.lengths import Lengths
from neuron_di.bench.run import Run, View, bench
from neuron_di.bench.settings import make_settings
from neuron_di.bench.summary import summarize
from neuron_di.errors import PeerGone

_GAP_MS = 10.0
_STREAMS = 64
_REQUESTS = 256
_SHORT, _LONG = 1, 100  # tokens of an answer: the difference is what tokens cost


def run_self_test(console: Console) -> int:
    """Print what the client costs. Returns the exit code."""
    costs = {}
    stall_ms = 0.0
    for num_tokens in (_SHORT, _LONG):
        with running_stub(num_tokens, _GAP_MS) as url:
            run = measure(url, num_tokens, concurrency=_STREAMS, requests=_REQUESTS)
        document = summarize(run)
        if document.endpoints[0].figures.num_ok != _REQUESTS:
            console.print(f"failed: {document.endpoints[0].failures}")
            return 1
        costs[num_tokens] = run.strain.cpu_s / _REQUESTS
        stall_ms = max(stall_ms, document.client.stall_ms_max)
    per_token_s = (costs[_LONG] - costs[_SHORT]) / (_LONG - _SHORT)
    per_request_s = costs[_SHORT] - per_token_s * _SHORT
    console.print(
        f"a request costs this client {per_request_s * 1e6:,.0f} µs of CPU, each token "
        f"{per_token_s * 1e6:,.1f} µs: at most {1 / max(per_token_s, 1e-9):,.0f} tokens/s a core"
    )
    console.print(f"longest standstill with {_STREAMS} streams: {stall_ms:,.1f} ms")
    return 0


@contextmanager
def running_stub(num_tokens: int, gap_ms: float) -> Iterator[str]:
    """The URL of a stub endpoint in a process of its own."""
    command = [sys.executable, "-m", "neuron_di.bench.stub_server", str(num_tokens), str(gap_ms)]
    # A group of its own: Ctrl-C is this process's, and no traceback of the other's is to be seen.
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise PeerGone("the stub endpoint did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def measure(url: str, num_tokens: int, *, concurrency: int, requests: int) -> Run:
    """A closed loop of short prompts."""
    settings = make_settings(
        {
            "urls": (url,),
            "concurrency": concurrency,
            "requests": requests,
            "input_tokens": Lengths("fixed", 16).words(),
            "output_tokens": str(num_tokens),
            "warmup": concurrency,
        }
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bench(settings, None, None, View()))
