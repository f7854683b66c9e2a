"""The proxies that are compared: how each is started in front of the stub workers.

All get the settings that favour them: quiet logs, room for every stream, round robin. The two
routers also get an address for their metrics, as one of them would else take every interface.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOM = "8192"  # requests at once


@dataclass(frozen=True, slots=True)
class StubPorts:
    """Where the stub workers listen, each a pair: prefill, decode. One process has them all."""

    http: tuple[int, int]
    link: tuple[int, int]
    pid: int = 0


@dataclass(frozen=True, slots=True)
class ProxyCommand:
    """How one is started. Without a command, clients talk to the stub's decode port directly."""

    name: str
    port: int
    command: tuple[str, ...] = ()
    note: str = ""


def direct(stubs: StubPorts, _: int) -> ProxyCommand:
    return ProxyCommand("direct", stubs.http[1], note="no proxy: what client and stub take")


def ours(stubs: StubPorts, port: int, processes: int = 1) -> ProxyCommand:
    prefill, decode = (f"http://127.0.0.1:{each}" for each in stubs.link)
    command = (
        *(sys.executable, "-m", "neuron_di", "proxy", f"--port={port}", "--log-level=warning"),
        *(f"--prefill-urls={prefill}", f"--decode-urls={decode}"),
        *(f"--requests-max={ROOM}", f"--queue-max={ROOM}", f"--processes={processes}"),
    )
    if processes == 1:
        return ProxyCommand("neuron-di", port, command, "both legs at once, one link per worker")
    note = f"the same with --processes={processes}"
    return ProxyCommand(f"neuron-di x{processes}", port, command, note)


def sglang_router(stubs: StubPorts, port: int, python: Path, metrics_port: int) -> ProxyCommand:
    prefill, decode = (f"http://127.0.0.1:{each}" for each in stubs.http)
    command = (
        *(str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--prefill", prefill, "none", "--decode", decode),
        *_router_flags(port, metrics_port),
    )
    return ProxyCommand("sglang-router", port, command, "Rust; both requests at once")


def vllm_router(stubs: StubPorts, port: int, program: Path, metrics_port: int) -> ProxyCommand:
    prefill, decode = (f"http://127.0.0.1:{each}" for each in stubs.http)
    command = (
        *(str(program), "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode),
        *_router_flags(port, metrics_port),
    )
    return ProxyCommand("vllm-router", port, command, "Rust; prefill's answer, then decode")


def vllm_demo(stubs: StubPorts, port: int, python: Path, script: Path) -> ProxyCommand:
    prefill, decode = (f"http://127.0.0.1:{each}" for each in stubs.http)
    command = (
        *(str(python), str(script), "--port", str(port)),
        *("--prefill-url", prefill, "--decode-url", decode),
    )
    return ProxyCommand("vllm-demo", port, command, "Quart; prefill's answer, then decode")


def nginx(stubs: StubPorts, port: int, folder: Path) -> ProxyCommand | None:
    """A plain reverse proxy of the decode worker: no prefill, no hand-over. None: not installed."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None:
        return None
    config = folder / "nginx.conf"
    config.write_text(
        f"""
daemon off; worker_processes 1; worker_rlimit_nofile 65536; pid {folder}/nginx.pid;
error_log {folder}/nginx.log crit;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_max_body_size 16m; client_body_buffer_size 1m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream decode {{ server 127.0.0.1:{stubs.http[1]}; keepalive 4096; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
""",
        encoding="utf-8",
    )
    command = (program, "-c", str(config), "-p", str(folder))
    return ProxyCommand("nginx", port, command, "a plain proxy of decode: no prefill")


def _router_flags(port: int, metrics_port: int) -> tuple[str, ...]:
    return (
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--policy", "round_robin", "--log-level", "error"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--max-concurrent-requests", ROOM),
    )
