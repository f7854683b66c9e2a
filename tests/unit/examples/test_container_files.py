"""What the Containerfile relies on: the requirements without torch, files that exist, no root."""

import re
import subprocess
import sys

from manifest_kit import COMMON

CONTAINER = COMMON / "container"
ROOT = COMMON.parents[1]
CONTAINERFILE = (CONTAINER / "Containerfile").read_text(encoding="utf-8")


def test_requirements_are_all_of_the_projects_but_torch() -> None:
    done = subprocess.run(
        [sys.executable, CONTAINER / "requirements.py", "etcd"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = {re.split(r"[^\w-]", line)[0] for line in done.stdout.splitlines()}
    assert {"pyzmq", "quart", "msgspec", "grpcio", "protobuf"} <= names
    assert "torch" not in names
    with (ROOT / "pyproject.toml").open(encoding="utf-8") as file:
        listed = re.findall(
            r'^    "([\w-]+)', file.read().partition("[project.opt")[0], re.MULTILINE
        )
    assert set(listed) - {"torch"} <= names
    assert len(listed) > 10


def test_what_is_copied_exists() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert len(sources) > 6
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_each_image_has_a_user_and_one_python() -> None:
    _, *stages = re.split(r"^FROM ", CONTAINERFILE, flags=re.MULTILINE)
    final = [
        stage for stage in stages if re.match(r"\S+ AS (worker|proxy)$", stage.splitlines()[0])
    ]
    assert len(final) == 2
    for stage in final:
        assert re.search(r"^USER 10001:10001$", stage, re.MULTILINE)
        assert 'ENTRYPOINT ["neuron-di"]' in stage
    # The wheel is built for one version.
    assert set(re.findall(r"py(?:thon:)?3\.?(1\d)", CONTAINERFILE)) == {"12"}


def test_a_hosts_workers_meet_at_one_lock_file() -> None:
    """They share the host's network, and with it the port of Neuron's send and receive."""
    page = (CONTAINER / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (order,) = re.findall(r"^docker run .*$", page, re.MULTILINE)
    words = order.split()
    assert words[words.index("--network") + 1] == "host"
    volumes = [words[i + 1] for i, word in enumerate(words) if word == "--volume"]
    assert "/tmp:/tmp" in volumes
    assert "/tmp" not in [words[i + 1] for i, word in enumerate(words) if word == "--tmpfs"]
