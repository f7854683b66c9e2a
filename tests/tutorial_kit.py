"""Runs steps of the Neuron tutorials, and reads the commands that they and their pages show."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from neuron_di import cli

EXAMPLES = Path(__file__).parents[1] / "examples"
STEP_TIMEOUT_S = 100
# One host's steps, and several hosts' of which this machine need not be one: dry runs show all.
HOSTS = "10.1.0.11,10.1.0.12"


class _Parsed(Exception):
    """Raised in place of running a command whose flags were accepted."""


def run_step(
    step: Path, *options: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A step to its end, which has to be soon: it waits for nobody's answer."""
    return subprocess.run(
        [str(step), *options],
        env=step_environ(environ or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """A step finds our neuron-di, and of this environment nothing that sets it."""
    kept = {"HOME", "PATH", "LANG", "OMP_NUM_THREADS", "PYTHONOPTIMIZE"}
    clean = {name: value for name, value in os.environ.items() if name in kept}
    clean["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), clean["PATH"]])
    return clean | dict(environ)


def in_shell(text: str, folder: Path, environ: Mapping[str, str]) -> str:
    """What a shell says to this text, which is typed into it in this folder. An order that fails,
    or a variable that was never set, fails it."""
    ended = subprocess.run(
        ["/bin/bash", "-euc", text],
        cwd=folder,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


class Patience:
    """Waiting for something slow: as long as it shows signs of life, and not for ever."""

    def __init__(self, now_s: float, *, silence_s: float, total_s: float) -> None:
        self._silence_s = silence_s
        self._end_s = now_s + total_s
        self._seen_s = now_s
        self._sign: object = None

    def lasts(self, now_s: float, sign: object) -> bool:
        """Whether to wait on. A sign other than the last one is one of life."""
        if sign != self._sign:
            self._sign, self._seen_s = sign, now_s
        return now_s < min(self._seen_s + self._silence_s, self._end_s)


def check_aws(words: list[str]) -> subprocess.CompletedProcess[str]:
    """AWS's own command line looks at an order, and at each of its parameters; it sends nothing."""
    return subprocess.run(
        [*words, "--generate-cli-skeleton", "output"],
        env=os.environ | {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )


def steps_of(folder: str) -> list[Path]:
    """The scripts that a reader starts, in the order of the page."""
    return [*sorted((EXAMPLES / folder).glob("[1-9]-*.sh")), EXAMPLES / folder / "install.sh"]


def copied(tutorial: str, folder: Path) -> Path:
    """A tutorial, alone in the world. Returns its folder, below examples/ of this one."""
    for name in ("neuron_common", tutorial):
        shutil.copytree(EXAMPLES / name, folder / "examples" / name)
    return folder / "examples" / tutorial


def shown_commands(output: str) -> list[list[str]]:
    """The words of each command that a step printed, without its redirections."""
    whole = output.replace(" \\\n", " ")
    return [
        [
            word
            for word in shlex.split(line[2:].replace("$(<", "").split(" #")[0])
            if word != "&" and not re.match(r"\d?>", word)
        ]
        for line in whole.splitlines()
        if line.startswith("$ ")
    ]


def page_commands(page: Path) -> list[list[str]]:
    """The words of each command in the blocks of a page."""
    blocks = re.findall(r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def links_of(page: Path) -> list[str]:
    """A page's links within the project. AssertionError for one that leads nowhere."""
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
    return links


def aws_orders(page: Path) -> list[list[str]]:
    """The words of each order to AWS in the blocks of a page, also within `$(…)`."""
    blocks = re.findall(r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [shlex.split(order, comments=True) for order in re.findall(r"aws ec2 [^;)\n]+", text)]


def neuron_di_words(command: list[str]) -> list[str] | None:
    """What neuron-di gets: the words behind it, also behind `env NAME=VALUE`. None: another."""
    words = list(command)
    while words and (words[0] == "env" or re.match(r"[A-Z_]+=", words[0])):
        words.pop(0)
    return words[1:] if words and words[0] == "neuron-di" else None


def real_parser(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """What fails unless neuron-di takes these words: its flags, and the checks of their values."""

    def stop(*_: Any, **__: Any) -> int:
        raise _Parsed

    for name in dir(cli):
        if re.fullmatch(r"run_\w+", name):
            monkeypatch.setattr(cli, name, stop)
    monkeypatch.setattr("neuron_di.status.show_status", stop)
    commands = {name: (options, stop) for name, (options, _) in cli._COMMANDS.items()}
    monkeypatch.setattr(cli, "_COMMANDS", commands)

    def accept(words: list[str]) -> None:
        with pytest.raises(_Parsed):
            cli._run(words)

    return accept
