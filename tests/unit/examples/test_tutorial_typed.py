"""What steps print and pages show can be typed: a shell of its own does it, with stand-ins for AWS.

Neither neuron-di nor the repository's own environment is on its PATH but where a page puts it.
"""

import os
import re
from pathlib import Path

import psutil
import pytest
from tutorial_kit import EXAMPLES, HOSTS, in_shell, run_step

TUTORIALS = sorted(path.parent.name for path in EXAMPLES.glob("*/settings.sh"))
TRN1 = EXAMPLES / "trn1"
tutorials = pytest.mark.parametrize("tutorial", TUTORIALS)
# Those who stay see the shell's last command; in its foreground they would keep it from coming.
NEURON_DI = """#!/bin/bash
case "$1" in
    key) echo a-key ;;
    proxy | worker)
        for ((i = 0; i < 100; i++)); do
            [ ! -e "$STATE/typed" ] || { echo "in the background: $1" && exit; }
            sleep 0.1
        done ;;
    *) echo "$KEY_NEURON_DI: $*" ;;
esac
"""
# Keeps a list of orders, one a line, words apart by tabs; answers as --query asks.
AWS = """#!/bin/bash
(IFS=$'\\t' && echo "$*" >>"$HOME/orders")
case "$2" in
    allocate-address) echo "eipalloc-$(wc -l <"$HOME/orders")" ;;
    describe-addresses) printf 'eipalloc-1\\teipalloc-2\\n' ;;
    describe-network-interfaces) echo eni-1 ;;
    describe-security-groups) echo sg-1 ;;
esac
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A reader's home, with stand-ins in bin."""
    (tmp_path / "bin").mkdir()
    programs = {"neuron-di": NEURON_DI, "aws": AWS, "etcd": "#!/bin/sh\n"}
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(body)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def type_in(text: str, home: Path, **environ: str) -> str:
    """Into a shell, to which a variable that was never set is an error. Returns what it says."""
    path = os.pathsep.join([str(home / "bin"), "/usr/bin", "/bin"])
    return in_shell(text, home, {"HOME": str(home), "PATH": path} | environ)


def block_with(words: str, tutorial: str) -> str:
    """The block of a page that has these words."""
    text = (EXAMPLES / tutorial / "README.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"^```\n(.*?)^```$", text, re.M | re.S) if words in b]
    return block


def orders(home: Path, verb: str) -> list[list[str]]:
    lines = (home / "orders").read_text().splitlines()
    return [words for line in lines if (words := line.split("\t"))[1] == verb]


def test_what_a_step_printed_does_the_same_by_hand(home: Path) -> None:
    """The key lands in its file and nowhere else; whoever stays is in the background."""
    state = home / "state"
    state.mkdir()
    shown = run_step(TRN1 / "4-serve.sh", "--dry-run", "--hosts", HOSTS, "--state", str(state))
    assert shown.returncode == 0, shown.stderr
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", shown.stdout, re.MULTILINE)
    assert len(commands) == 7
    said = type_in("\n".join([*commands, 'touch "$STATE/typed"; wait']), home, STATE=str(state))
    assert said == ""
    assert (state / "key").read_text() == "a-key\n"
    assert (state / "authorization").read_text() == "Authorization: Bearer a-key\n"
    for name in ("key", "authorization"):
        assert (state / name).stat().st_mode & 0o77 == 0
    for name, command in {"proxy": "proxy", "prefill-0": "worker", "decode-0": "worker"}.items():
        assert (state / f"{name}.log").read_text() == f"in the background: {command}\n"


@tutorials
def test_the_key_by_hand_is_the_one_that_the_steps_made(tutorial: str, home: Path) -> None:
    step = EXAMPLES / tutorial / "4-serve.sh"
    shown = run_step(step, "--dry-run", "--hosts", HOSTS, environ={"HOME": str(home)}).stdout
    (place,) = re.findall(r"^ +>(\S+/key)$", shown, re.MULTILINE)
    Path(place).parent.mkdir(parents=True)
    Path(place).write_text("the-key\n")
    said = type_in(block_with("KEY_NEURON_DI", tutorial), home)
    assert said == "the-key: status --url http://10.1.0.11:8000\n"


def test_a_mend_that_asks_the_proxy_has_the_key(home: Path) -> None:
    state = home / "a state"
    state.mkdir()
    (state / "key").write_text("the-key\n")
    mine = psutil.Process()
    ticks = Path(f"/proc/{mine.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (state / "decode-1.pid").write_text(f"{mine.pid} {ticks}\n")
    ended = run_step(
        TRN1 / "6-bench.sh",
        *("--hosts", "127.0.0.1,203.0.113.9", "--state", str(state)),
        environ={"PROXY_PORT": "18000"},
    )
    assert ended.returncode == 2, ended.stderr
    (mend,) = re.findall(r"mend: on the first host: (.*)", ended.stderr)
    assert type_in(mend, home) == "the-key: drain decode-1 --url http://127.0.0.1:18000\n"


@tutorials
def test_what_aws_has_is_given_back_by_the_page(tutorial: str, home: Path) -> None:
    state = home / f".neuron-di/tutorial-{tutorial}"
    state.mkdir(parents=True)
    (state / "instances").write_text("i-1\ni-2\n")
    type_in(block_with("terminate-instances", tutorial), home, REGION="us-west-2")
    for verb in ("terminate-instances", "wait"):
        (order,) = orders(home, verb)
        assert order[-3:] == ["--instance-ids", "i-1", "i-2"]
    released = [order[-1] for order in orders(home, "release-address")]
    assert released == ([] if tutorial == "inf2" else ["eipalloc-1", "eipalloc-2"])
    (order,) = orders(home, "delete-security-group")
    assert order[-1] == "sg-1"


def test_each_instance_gets_an_address_of_its_own(home: Path) -> None:
    state = home / ".neuron-di/tutorial-trn1"
    state.mkdir(parents=True)
    (state / "instances").write_text("i-1\ni-2\n")
    text = block_with("allocate-address", "trn1").replace("./1-launch.sh", "true")
    type_in(text, home, REGION="us-west-2")
    asked = [" ".join(order) for order in orders(home, "describe-network-interfaces")]
    assert [re.findall(r"Values=(i-\d)", order) for order in asked] == [["i-1"], ["i-2"]]
    given = [
        order[order.index("--allocation-id") + 1] for order in orders(home, "associate-address")
    ]
    assert len(set(given)) == 2


def test_a_simulated_step_that_starts_nothing_leaves_nothing(home: Path) -> None:
    (home / "bin/neuron-di").write_text(
        '#!/bin/sh\n[ -d "$NRT_SIM_ROOT" ] && echo "$NRT_SIM_ROOT"\n'
    )
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    state = home / "state"
    ended = run_step(
        TRN1 / "3-compile.sh", "--simulate", "--state", str(state), environ={"PATH": path}
    )
    assert ended.returncode == 0, ended.stderr
    folder = Path(ended.stdout.splitlines()[-1])
    assert re.fullmatch(r"/tmp/nrt-\w+", str(folder))
    assert not folder.exists()
    assert list(state.iterdir()) == []


def test_a_simulated_launch_leaves_nothing(home: Path) -> None:
    """It has a folder for its simulated hosts as every step has, and then only shows."""
    (home / "bin/mktemp").write_text('#!/bin/sh\n/usr/bin/mktemp "$@" | tee "$HOME/made"\n')
    (home / "bin/mktemp").chmod(0o755)
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    environ = {"HOME": str(home), "PATH": path}
    ended = run_step(TRN1 / "1-launch.sh", "--simulate", environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert not Path((home / "made").read_text().strip()).exists()
    assert list((home / ".neuron-di/tutorial-trn1-simulated").iterdir()) == []
