"""The example cluster grows, shrinks and changes under load, as its README says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "xpyd" / "one_host.py"
EXAMPLE_TIMEOUT_S = 100

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(EXAMPLE_TIMEOUT_S + 10)
@pytest.mark.parametrize("registry", ["etcd", "own"])
def test_the_cluster_grows_shrinks_and_changes_without_a_failed_request(registry: str) -> None:
    if registry == "etcd" and shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), *(["--registry"] if registry == "own" else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    out = ended.stdout
    answers = re.search(r"^(\d+) answers were streamed meanwhile, 0 failed, 0 differed", out, re.M)
    assert answers is not None, out
    assert int(answers[1]) > 10
    assert ("--etcd=127.0.0.1:" in out) == (registry == "etcd")
    shown = re.findall(r"^\$ neuron-di worker (\S+) ", out, re.M)  # as one types it in the root
    assert len(shown) == 4
    assert all((ROOT / model).is_dir() for model in shown)
    # It did what it shows: the words of the commands, and the tables between them.
    assert "decode-0 has ended" in out
    assert "it did switch: prefill -> decode" in out
    first, grown, changed = out.split("$ neuron-di status")[1:]
    assert roles(first) == {"prefill-0": "prefill", "decode-0": "decode"}
    assert roles(grown) == roles(first) | {"prefill-1": "prefill", "decode-1": "decode"}
    assert roles(changed) == {"prefill-0": "prefill", "decode-1": "decode", "prefill-1": "decode"}
    assert out.endswith("All processes have ended.\n")


def roles(table: str) -> dict[str, str]:
    return dict(re.findall(r"^((?:prefill|decode)-\d) +(prefill|decode) +ready", table, re.M))


def test_the_readme_names_what_is_there() -> None:
    """Commands of several hosts cannot run here; their flags and files must exist."""
    text = (EXAMPLE.parent / "README.md").read_text()
    for name in re.findall(r"\]\(([^)#]+)\)", text):
        assert (EXAMPLE.parent / name).exists(), name
    commands = re.findall(r"^neuron-di (key create|\w+)((?:.*\\\n)*.*)", text, re.M)
    assert len(commands) >= 8
    for command, rest in commands:
        listed = subprocess.run(
            [sys.executable, "-m", "neuron_di", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flag in re.findall(r"(--[a-z][a-z-]+)", rest):
            assert flag in listed, f"{command} {flag}"
