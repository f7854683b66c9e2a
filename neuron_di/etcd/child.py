"""An etcd of our own as a child process, for one machine: `--etcd auto`.

It listens on loopback only and ends with us, however we end. What it stores goes with it.
"""

import asyncio
import contextlib
import os
import random
import shutil
import socket
import sys
from typing import Literal, Self

import msgspec

from neuron_di.clock import Deadline, now_s
from neuron_di.config import child_environment
from neuron_di.errors import ConfigError, PeerError
from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.failures import one_line
from neuron_di.obs import get_logger
from neuron_di.own_folder import OwnFolder

_log = get_logger(__name__)

START_TIMEOUT_S = 15.0
STARTS_MAX = 3  # somebody may take a port before etcd has it
LAST_WORDS_MAX = 300
LINE_BYTES_MAX = 64 << 10
END_TIMEOUT_S = 3.0
BACKOFF_S_MIN = 0.2
BACKOFF_S_MAX = 5.0
# Below what Linux gives to outgoing connections: they cannot take a port before etcd has it.
PORT_MIN, PORT_MAX = 20_000, 32_000
PORT_TRIES_MAX = 200
FOLDER_PREFIX = "neuron-di-etcd-"

# The interpreter becomes etcd once it is tied to us: the tie outlives the exec.
TIED = (
    "import os, sys; from neuron_di_bindings.process import end_with_parent; "
    "end_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


class ChildEtcd:
    """etcd while entered: answering on entry, gone with its folder on exit.

    `address` is HOST:PORT. An etcd that ends by itself is started again, with what it stored.
    """

    def __init__(self) -> None:
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._last_words = ""  # of the process that ran last, on its standard error
        self._folder: OwnFolder | None = None

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def __aenter__(self) -> Self:
        """ConfigError where etcd is not installed or does not start."""
        program = shutil.which("etcd")
        if program is None:
            raise ConfigError(
                "--etcd auto needs the program etcd, which is not installed: "
                "apt-get install etcd-server, or give the address of an etcd that runs"
            )
        self._folder = OwnFolder(FOLDER_PREFIX)
        try:
            await self._start_first(program, self._folder.path)
        except BaseException:
            await self._end()
            raise
        self._watch = asyncio.create_task(self._keep_up())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _start_first(self, program: str, folder: str) -> None:
        """Start it, at other ports where it ends at once."""
        for number in range(STARTS_MAX):
            client_port, peer_port = free_ports(2)
            self.address = f"127.0.0.1:{client_port}"
            data = f"{folder}/data-{number}"
            self._command = _command(program, data, client_port, peer_port)
            try:
                await self._start()
                return
            except _EndedError as error:
                if number == STARTS_MAX - 1:
                    raise
                _log.warning("etcd_start_failed", reason=error.message)

    async def _start(self) -> None:
        self._last_words = ""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us: it ends when we end
            # An operator's variables for an etcd of theirs, or for etcdctl, are not meant for this.
            env={k: v for k, v in child_environment().items() if not k.startswith("ETCD_")},
        )
        assert self._process.stderr is not None
        self._hearing = asyncio.create_task(self._hear(self._process.stderr))
        deadline = Deadline.after(START_TIMEOUT_S)
        async with EtcdClient([self.address]) as client:
            while True:
                if self._process.returncode is not None:
                    await asyncio.wait([self._hearing], timeout=END_TIMEOUT_S)
                    code, words = self._process.returncode, self._last_words
                    raise _EndedError(
                        f"etcd ended with code {code} instead of starting"
                        + (f": {words}" if words else "")
                    )
                with contextlib.suppress(PeerError):
                    short = Deadline.after(0.5).earlier_of(deadline)
                    await client.get(b"/", deadline=short)
                    break
                if deadline.has_passed():
                    raise ConfigError(f"etcd did not answer within {START_TIMEOUT_S:g} s")
        _log.info("etcd_started", address=self.address, pid=self._process.pid)

    async def _hear(self, stream: asyncio.StreamReader) -> None:
        """Keep what it said last, and read the rest away: it would stand still else.

        Why it ends comes before a stack of calls, which says nobody anything.
        """
        rest, reason = b"", ""
        while piece := await stream.read(1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            for line in (*lines, rest):
                reason = reason or _reason(line)
                words = reason or line.decode(errors="replace")
                if words.strip():
                    self._last_words = one_line(words, LAST_WORDS_MAX)
            rest = rest[-LINE_BYTES_MAX:]

    async def _keep_up(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            assert self._process is not None
            began_s = now_s()
            code = await self._process.wait()
            if now_s() - began_s >= BACKOFF_S_MAX:
                backoff_s = BACKOFF_S_MIN
            words = self._last_words
            _log.warning("etcd_ended", code=code, words=words, restart_in_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
            try:
                await self._start()
            except (ConfigError, OSError) as error:
                _log.warning("etcd_restart_failed", reason=str(error))
                if self.pid is not None:
                    self._process.kill()

    async def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.wait([self._hearing])
        if self._folder is not None:
            self._folder.remove()
        if self._watch is not None and not self._watch.cancelled():
            self._watch.result()  # it had failed, which is our own bug: show it


def free_ports(num: int) -> list[int]:
    """Ports of loopback that nobody listens on now, below those of outgoing connections."""
    found: list[int] = []
    for _ in range(PORT_TRIES_MAX):
        port = random.randint(PORT_MIN, PORT_MAX)  # noqa: S311 - no secret
        if port in found:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == num:
            return found
    raise ConfigError(f"no free port from {PORT_MIN} to {PORT_MAX} for etcd")


def _command(program: str, data: str, client_port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    # One machine: short timers make it answer again sooner after a restart.
    flags = {
        "name": "neuron-di",
        "data-dir": data,
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"neuron-di={peer}",
        "heartbeat-interval": "20",
        "election-timeout": "200",
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": "10000",
        "logger": "zap",
        "log-level": "error",
    }
    tied = [sys.executable, "-c", TIED, str(os.getpid()), program]
    return [*tied, *(f"--{name}={value}" for name, value in flags.items())]


class _LogLine(msgspec.Struct):
    level: Literal["panic", "fatal"]
    msg: str
    error: str = ""


_log_line_decoder = msgspec.json.Decoder(_LogLine)


def _reason(line: bytes) -> str:
    """Why etcd ends, of the line that says it; empty of any other."""
    if line.startswith((b"panic: ", b"fatal error: ")):
        return line.decode(errors="replace")
    try:
        said = _log_line_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f"{said.msg}: {said.error}" if said.error else said.msg


class _EndedError(ConfigError):
    """Raised when etcd ends instead of starting."""
