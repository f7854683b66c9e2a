"""What checks look at: files, programs, packages and variables of a machine.

All of it can be said by whoever makes a `Machine`, so a test gives a check a folder that looks
like another machine's root, and programs and packages of its own.
"""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO

from neuron_di.clock import Deadline
from neuron_di.config import child_environment
from neuron_di.doctor.answer_page import AnswerPage

FILE_BYTES_MAX = 1 << 20
OUTPUT_BYTES_MAX = 1 << 18  # of each stream; what a program writes beyond it is dropped
_LOOK_EVERY_S = 0.05  # whether it ended
_KILLED = -int(signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program ended. A negative `returncode` is the signal that ended it."""

    returncode: int
    stdout: str
    stderr: str
    has_timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Of a file system: `free_bytes` are those that an ordinary user may take."""

    num_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as its files, programs, packages and variables show it.

    Paths are absolute as on the machine, such as `/sys/class/infiniband`, and looked up below
    `root`. Programs are found by the PATH of `environment` and get that environment; so neither
    they nor the packages follow `root`. `package_path` are folders with installed packages; None
    is this interpreter's. `hanging` has what the Neuron runtime answered before it hung.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=child_environment)
    package_path: Sequence[str] | None = None
    hanging: AnswerPage = field(default_factory=AnswerPage, repr=False, compare=False)

    def read(self, path: str) -> str | None:
        """A file's text, at most `FILE_BYTES_MAX` of it, without spaces around it.

        None where there is none, or it may not be read. Never read what may block, as a pipe.
        """
        try:
            with self._below_root(path).open("rb") as file:
                return file.read(FILE_BYTES_MAX).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def names(self, pattern: str) -> list[str]:
        """The paths that a shell's pattern fits, sorted, `neuron2` before `neuron10`."""
        found = glob(pattern.lstrip("/"), root_dir=self.root)
        return sorted(("/" + path for path in found), key=_natural)

    def target(self, path: str) -> str | None:
        """Where a link leads in the end, as a path of the machine; None where nothing is there.

        For links of /sys, which are relative.
        """
        try:
            real = self._below_root(path).resolve(strict=True)
            return "/" + str(real.relative_to(self.root.resolve())).removeprefix(".")
        except (OSError, ValueError, RuntimeError):
            return None

    def link(self, path: str) -> str | None:
        """What a link says, unread: `socket:[4711]`; None where there is none to be read."""
        try:
            return os.readlink(self._below_root(path))
        except OSError:
            return None

    def room(self, path: str) -> Room | None:
        """How large the file system is in which a path lies; None where there is no such path."""
        try:
            found = os.statvfs(self._below_root(path))
        except OSError:
            return None
        return Room(
            num_bytes=found.f_blocks * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize
        )

    def may_write(self, path: str) -> bool:
        """Whether this user may make files in a folder."""
        folder = self._below_root(path)
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)

    def program(self, name: str) -> str | None:
        """Where a program is, by the PATH of `environment`; None where it is not."""
        return shutil.which(name, path=self.environment.get("PATH", os.defpath))

    def run(self, *command: str, timeout_s: float) -> Ran | None:
        """Run a program to its end, or kill it after `timeout_s`. None: it is not there.

        It reads nothing, and its own children are not waited for.
        """
        path = self.program(command[0])
        if path is None:
            return None
        try:
            child = subprocess.Popen(  # noqa: S603 - a check's own words, without a shell
                [path, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(self.environment),
            )
        except OSError as error:  # it is there, and is another machine's, or has no interpreter
            return Ran(returncode=127, stdout="", stderr=str(error))
        with child:
            try:
                outputs, has_timed_out = _outputs(child, Deadline.after(timeout_s))
            except BaseException:
                child.kill()
                raise
        texts = [bytes(output).decode("utf-8", "replace") for output in outputs]
        return Ran(
            returncode=_KILLED if has_timed_out else child.returncode,
            stdout=texts[0],
            stderr=texts[1],
            has_timed_out=has_timed_out,
        )

    def package(self, name: str) -> str | None:
        """The version of an installed package, by its name on an index; None where it is not."""
        distribution = self.distribution(name)
        return None if distribution is None else distribution.version

    def distribution(self, name: str) -> importlib.metadata.Distribution | None:
        """All that is known of an installed package; None where it is not there."""
        found = importlib.metadata.Distribution.discover(name=name, path=self._folders())
        # A folder that was left behind by a half-done uninstall has no version.
        return next((each for each in found if _has_version(each)), None)

    def distributions(self) -> list[importlib.metadata.Distribution]:
        """All installed packages; of several of one name the first, which Python imports."""
        found = importlib.metadata.Distribution.discover(path=self._folders())
        by_name: dict[str, importlib.metadata.Distribution] = {}
        for each in found:
            if _has_version(each):
                by_name.setdefault(each.name.lower().replace("_", "-"), each)
        return list(by_name.values())

    def _folders(self) -> list[str]:
        return list(sys.path if self.package_path is None else self.package_path)

    def _below_root(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def last_line(text: str) -> str:
    """That says anything, without spaces around it; empty where none does."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _natural(path: str) -> list[tuple[int, str]]:
    """Numbers in a name sort as numbers."""
    parts = re.split("([0-9]+)", path)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _has_version(distribution: importlib.metadata.Distribution) -> bool:
    """Its metadata is whatever stands in a file."""
    try:
        return bool(distribution.version)
    except Exception:
        return False


def _outputs(
    child: subprocess.Popen[bytes], deadline: Deadline
) -> tuple[tuple[bytearray, bytearray], bool]:
    """(what it wrote to both streams, whether it was killed for taking too long)."""
    assert child.stdout is not None
    assert child.stderr is not None
    outputs = bytearray(), bytearray()
    streams: tuple[IO[bytes], IO[bytes]] = child.stdout, child.stderr
    with DefaultSelector() as selector:
        for stream, output in zip(streams, outputs, strict=True):
            selector.register(stream, EVENT_READ, output)
        while selector.get_map() and not deadline.has_passed():
            has_ended = child.poll() is not None  # before looking: what it wrote is there then
            ready = selector.select(0 if has_ended else min(_LOOK_EVERY_S, deadline.remaining_s()))
            if has_ended and not ready:  # a child of its own keeps them open
                break
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fileobj)
                key.data.extend(piece[: OUTPUT_BYTES_MAX - len(key.data)])
    try:
        child.wait(deadline.remaining_s())
        return outputs, False
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return outputs, True
