"""The installing step, with a made-up environment of the SDK: what lies over what, and again.

AWS's packages and pip are stand-ins here: what pip would install says what it finds.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tutorial_kit import EXAMPLES, copied, in_shell, run_step

PLAIN = {"PATH": "/usr/bin:/bin"}

# Answers what the step asks of it, and makes an environment whose pip makes a neuron-di.
PYTHON = """#!/bin/bash
cd "$(dirname "$0")/.." || exit 1
case "$*" in
    *sysconfig*) echo "$PWD" ;;
    *torch*) echo 2.9.1+cpu ;;
    "-m venv "*)
        echo "$*" >>calls
        folder=${!#}
        [ "$3" != --clear ] || rm -rf "$folder"
        mkdir -p "$folder/bin" "$folder/lib/python3.12/site-packages"
        cat >"$folder/bin/pip" <<'END'
#!/bin/bash
echo "$*" >>"$(dirname "$0")/../calls"
printf '#!/bin/bash\\ncommand -v neuronx-cc\\n' >"$(dirname "$0")/neuron-di"
chmod +x "$(dirname "$0")/neuron-di"
END
        chmod +x "$folder/bin/pip" ;;
esac
"""


def make_sdk(folder: Path) -> Path:
    packages = folder / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (folder / "editable").mkdir()
    (folder / "editable/of_the_sdk.py").touch()
    (packages / "editable.pth").write_text(f"{folder}/editable\n")
    (folder / "Python.h").touch()
    (folder / "bin").mkdir()
    for name, body in {"python": PYTHON, "neuronx-cc": "#!/bin/sh\n"}.items():
        (folder / "bin" / name).write_text(body)
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return copied("trn1", tmp_path / "root")


def run(steps: Path, name: str, sdk: Path) -> str:
    """A step in a world where nothing but the system's own programs is found by their names."""
    environ = {
        "PATH": "/usr/bin:/bin",
        "STATE": str(sdk.parent / "state"),
        "SDK_ENVIRONMENT": str(sdk),
    }
    # `run_step` puts this interpreter's folder first; neuron-di there is not the one to be found.
    ended = subprocess.run(
        [steps / name], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_compiler_and_all_packages_of_the_sdk_are_found(steps: Path, tmp_path: Path) -> None:
    sdk = make_sdk(tmp_path / "an sdk")
    run(steps, "install.sh", sdk)
    environment = steps.parents[1] / ".venv"
    assert "torch==2.9.1\n" in (environment / "calls").read_text()
    # What torch-neuronx starts by its bare name is found by whoever runs in step 3.
    assert run(steps, "3-compile.sh", sdk).endswith(f"{environment}/bin/neuronx-cc\n")
    # Python reads the SDK's own .pth files as well.
    packages = environment / "lib/python3.12/site-packages"
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import site; site.addsitedir({str(packages)!r})\nimport of_the_sdk",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_again_it_installs_again_and_over_another_sdk_anew(steps: Path, tmp_path: Path) -> None:
    first, other = make_sdk(tmp_path / "first"), make_sdk(tmp_path / "other")
    environment = steps.parents[1] / ".venv"
    for num_calls in (1, 2):
        run(steps, "install.sh", first)
        assert len((environment / "calls").read_text().splitlines()) == num_calls
    assert "--clear" not in (first / "calls").read_text()
    run(steps, "install.sh", other)
    assert (other / "calls").read_text() == f"-m venv --clear {environment}\n"
    (link,) = environment.glob("lib/*/site-packages/neuron_sdk.pth")
    assert f"{other}/lib" in link.read_text()


def test_an_environment_of_somebody_elses_stays_as_it_is(steps: Path, tmp_path: Path) -> None:
    environment = steps.parents[1] / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/neuron-di").symlink_to("/bin/true")
    sdk = make_sdk(tmp_path / "sdk")
    assert "is not of this step, and stays" in run(steps, "install.sh", sdk)
    assert not (sdk / "calls").exists()


@pytest.mark.parametrize("tutorial", ["inf2", "trn1", "trn2"])
def test_neuron_di_by_hand_is_found_as_the_page_says(tutorial: str, tmp_path: Path) -> None:
    steps = copied(tutorial, tmp_path / "a root")
    said = run(steps, "install.sh", make_sdk(tmp_path / "sdk"))
    page = (steps / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^export PATH=.*$", page, re.MULTILINE)
    for typed in (line, said.rpartition(": ")[2]):
        assert typed.startswith("export PATH=")
        assert in_shell(f"{typed}\ncommand -v neuron-di pip", steps, PLAIN).splitlines() == [
            f"{steps.parents[1]}/.venv/bin/neuron-di",
            f"{steps.parents[1]}/.venv/bin/pip",
        ]


def test_what_it_printed_does_the_same_by_hand(steps: Path, tmp_path: Path) -> None:
    said = run(steps, "install.sh", make_sdk(tmp_path / "an sdk"))
    environment = steps.parents[1] / ".venv"
    (made,) = environment.glob("lib/*/site-packages/neuron_sdk.pth")
    content = made.read_text()
    shutil.rmtree(environment)
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", said, re.MULTILINE)
    assert len(commands) == 5
    assert in_shell("\n".join(commands), tmp_path, PLAIN) == "2.9.1+cpu\n"
    assert made.read_text() == content
    assert (environment / "bin/neuronx-cc").exists()


def test_a_dry_run_shows_the_link_to_the_compiler() -> None:
    shown = run_step(EXAMPLES / "trn1/install.sh", "--dry-run").stdout
    assert "bin/neuronx-cc " in shown.replace(" \\\n", " ")
