"""What a proxy costs: CPU per relayed token, latency it adds, and memory, beside other proxies.

Stub workers make a token per tick for each open stream; the contenders take turns in front of them,
round by round. Each load is a fixed number of requests, so that what a request costs and what a
token costs are both in CPU per token, in the proportion that the reply's length gives them.
"""

import argparse
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.contenders import proxies
from benchmarks.contenders.proxies import ProxyCommand, StubPorts
from benchmarks.process_tree import cpu_s
from benchmarks.provenance import command_line, commit_description, machine_description
from benchmarks.proxy_load import Load
from benchmarks.proxy_plot import plot_proxies
from benchmarks.proxy_process import RunningProxy, free_ports, running, stub_workers
from benchmarks.proxy_report import OURS, OURS_TWICE, Cell, ProxyReport, Sample
from benchmarks.proxy_stub import PREFILL_S
from benchmarks.proxy_text import findings, print_report, write_report
from neuron_di.config import raise_descriptor_limit

MODULE = "benchmarks.proxy"
_IDLE_S = 5.0
_NAMES = ("direct", "nginx", "vllm-demo", "vllm-router", "sglang-router", OURS, OURS_TWICE)


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 132)
    raise_descriptor_limit()  # what it starts inherits it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders are ended then, too
    begun_s = time.monotonic()
    report = ProxyReport(
        command=command_line(MODULE, options, parser.parse_args([])),
        machine=machine_description(),
        commit=commit_description(),
        tick_ms=options.tick_ms,
        prefill_ms=PREFILL_S * 1000,
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-proxy-") as folder,
        stub_workers(options.tick_ms / 1000) as stubs,
    ):
        commands = contenders(options, stubs, Path(folder), console)
        report.notes = {command.name: command.note for command in commands}
        with console.status("", refresh_per_second=1) as status:
            for number in range(1, options.rounds + 1):
                measure_round(number, commands, options, stubs.pid, report, status.update)
    report.took_s = time.monotonic() - begun_s
    print_report(console, report)
    write_report(report, options.results)
    plot_proxies(report, options.results / "proxy.png")
    console.print(f"written: proxy.md, .json, .png in {options.results}")
    return 1 if findings(report) else 0


def contenders(
    options: argparse.Namespace, stubs: StubPorts, folder: Path, console: Console
) -> list[ProxyCommand]:
    """Those that are wanted and there; a line about each that is not there."""
    ports = iter(free_ports(9))
    found: list[ProxyCommand] = []
    missing = {"vllm-demo": "--demo-proxy", "vllm-router": "--vllm-router"}
    missing["sglang-router"] = "--sglang-python"
    missing["nginx"] = "install it"
    for name in options.contenders:
        port = next(ports)
        command: ProxyCommand | None = None
        if name == "direct":
            command = proxies.direct(stubs, port)
        elif name in (OURS, OURS_TWICE):
            command = proxies.ours(stubs, port, processes=1 if name == OURS else 2)
        elif name == "nginx":
            command = proxies.nginx(stubs, port, folder)
        elif name == "sglang-router" and options.sglang_python is not None:
            command = proxies.sglang_router(stubs, port, options.sglang_python, next(ports))
        elif name == "vllm-router" and options.vllm_router is not None:
            command = proxies.vllm_router(stubs, port, options.vllm_router, next(ports))
        elif name == "vllm-demo" and options.demo_proxy is not None:
            python = options.demo_python or Path(sys.executable)
            command = proxies.vllm_demo(stubs, port, python, options.demo_proxy)
        if command is None:
            console.print(f"[dim]without {name}: {missing[name]}[/dim]")
        else:
            found.append(command)
    return found


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Streams by replies with the first prompt length; then every prompt length."""
    by_streams = [
        Cell(streams, reply, options.prompts[0])
        for reply, streams in itertools.product(options.replies, options.streams)
    ]
    by_prompt = [
        Cell(streams, options.replies[0], prompt)
        for streams, prompt in itertools.product(options.prompt_streams, options.prompts)
    ]
    return list(dict.fromkeys(by_streams + by_prompt))


def measure_round(
    number: int,
    commands: list[ProxyCommand],
    options: argparse.Namespace,
    stub_pid: int,
    report: ProxyReport,
    tell: Callable[[str], None],
) -> None:
    """All loads on each, in turns. Proxies are started for it: where its memory comes to lie makes
    a process faster or slower for as long as it runs."""
    with running(commands) as started:
        warm_up(started)
        if number == 1:
            report.idle_percent = idle_percent(started)
        for cell in cells_of(options):
            for proxy in started if number % 2 else reversed(started):
                tell(f"round {number}, {cell}: {proxy.name}")
                report.samples.append(sample(proxy, cell, number, options, stub_pid))


def warm_up(proxies: list[RunningProxy]) -> None:
    """A small load on each, whose first requests would count what is done once."""
    for proxy in proxies:
        proxy.measure(
            Load(port=0, streams=16, requests=4, reply_tokens=8, prompt_tokens=1000, timeout_s=60)
        )


def idle_percent(proxies: list[RunningProxy]) -> dict[str, float]:
    """What each takes of a core while nothing is asked: that much it spoils the others' turns."""
    time.sleep(_IDLE_S / 5)  # what a start leaves to be done
    before_s = [proxy.cpu_s() for proxy in proxies]
    time.sleep(_IDLE_S)
    return {
        proxy.name: (proxy.cpu_s() - at_s) / _IDLE_S * 100
        for proxy, at_s in zip(proxies, before_s, strict=True)
    }


def sample(
    proxy: RunningProxy, cell: Cell, number: int, options: argparse.Namespace, stub_pid: int
) -> Sample:
    """One load on one proxy."""
    expected_s = PREFILL_S + (cell.reply_tokens - 1) * options.tick_ms / 1000
    load = Load(
        port=0,
        streams=cell.streams,
        requests=requests_per_stream(cell.streams, expected_s, options),
        reply_tokens=cell.reply_tokens,
        prompt_tokens=cell.prompt_tokens,
        timeout_s=20 + 10 * max(options.cell_s, expected_s),
    )
    before_s = cpu_s(stub_pid)
    seen = proxy.measure(load)
    seen["harness_cpu_s"] = seen["client_cpu_s"] + cpu_s(stub_pid) - before_s
    return Sample.of(proxy.name, cell, number, seen)


def requests_per_stream(streams: int, expected_s: float, options: argparse.Namespace) -> int:
    """So many that a load lasts, unless there are enough streams to make up for it."""
    cell_s = options.cell_s * (2 if streams == 1 else 1)  # or its p99 is that of a few tokens
    lasting = round(cell_s / expected_s)
    enough = -(-options.cell_requests // streams)
    return max(1, min(lasting, enough))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256, 1000])
    parser.add_argument("--replies", type=int, nargs="+", default=[8, 128], help="tokens")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[1000, 10_000, 40_000, 100_000], help="tokens"
    )
    parser.add_argument(
        "--prompt-streams", type=int, nargs="+", default=[1, 16], help="with those prompts"
    )
    parser.add_argument("--cell-s", type=float, default=3.0, help="a load lasts at least so long")
    parser.add_argument(
        "--cell-requests", type=int, default=6000, help="or has at least so many requests"
    )
    parser.add_argument("--tick-ms", type=float, default=40.0, help="a step of the stub workers")
    parser.add_argument("--contenders", nargs="+", default=list(_NAMES), choices=_NAMES)
    parser.add_argument("--sglang-python", type=Path, help="a Python that has sglang-router")
    parser.add_argument("--vllm-router", type=Path, help="the program of that name")
    parser.add_argument(
        "--demo-proxy", type=Path, help="vLLM's Quart example for prefill and decode"
    )
    parser.add_argument("--demo-python", type=Path, help="a Python that has what it imports")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
