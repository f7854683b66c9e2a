"""The pages of the Neuron tutorials say what there is: steps, cores, ports, arithmetic."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from manifest_kit import settings
from tutorial_kit import (
    EXAMPLES,
    HOSTS,
    aws_orders,
    check_aws,
    links_of,
    neuron_di_words,
    page_commands,
    real_parser,
    run_step,
    shown_commands,
    steps_of,
)

TUTORIALS = ("trn1", "inf2", "trn2")
COMMON = EXAMPLES / "neuron_common"
PAGES = [
    *(EXAMPLES / name / "README.md" for name in TUTORIALS),
    *(COMMON / name / "README.md" for name in ("systemd", "kubernetes", "container")),
]
WITH_HOSTS = ("--hosts", HOSTS)
SERVING = ("4-serve", "6-bench", "7-scale-out")
CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES="  # differs from worker to worker
OF_THE_KERNELS_CHOICE = {40001}  # the address of a registry, in dry runs
tutorials = pytest.mark.parametrize("tutorial", TUTORIALS)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)


def text_of(tutorial: str) -> str:
    return (EXAMPLES / tutorial / "README.md").read_text(encoding="utf-8")


@tutorials
def test_the_steps_are_those_of_every_tutorial(tutorial: str) -> None:
    first = text_of(tutorial).split("\n\n")[1]
    assert first.startswith("**Nothing on this page has run on ")
    listed = re.findall(r"^\| \[([\w.-]+)\]\(\1\)", text_of(tutorial), re.MULTILINE)
    assert sorted(listed) == sorted(step.name for step in steps_of(tutorial))
    for step in steps_of(tutorial):
        same = EXAMPLES / "trn1" / step.name
        assert step.read_bytes() == same.read_bytes()
        assert step.stat().st_mode & 0o111
        assert "set -euo pipefail" in step.read_text(encoding="utf-8")


@tutorials
def test_settings_say_all_that_trn1s_say(tutorial: str) -> None:
    assert settings(tutorial).keys() == settings("trn1").keys()


@pages
def test_what_a_page_links_to_is_there(page: Path) -> None:
    assert links_of(page)


@pages
def test_lines_of_a_page_are_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


@pages
def test_commands_of_a_page_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = real_parser(monkeypatch)
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`(neuron-di (?!drain HOST)[a-z-]+ [^`…]+)`", text)
    words = [neuron_di_words(each) for each in [*page_commands(page), *map(str.split, inline)]]
    taken = [each for each in words if each and "…" not in each]
    if page.parent.name != "container":  # there it stands behind docker's
        assert taken
    for each in taken:
        accept([word for word in each if not word.startswith(">")])
    for step, *options in (each for each in page_commands(page) if each[0].startswith("./")):
        assert (page.parent / step).is_file(), step
        assert set(options) <= {"--dry-run", "--simulate"}, options


@tutorials
def test_one_host_has_the_cores_that_the_page_names(tutorial: str) -> None:
    text, chosen = text_of(tutorial), settings(tutorial)
    tp, num_cores = int(chosen["TP"]), int(chosen["NUM_CORES"])
    shown = shown_commands(run_step(EXAMPLES / tutorial / "4-serve.sh", "--dry-run").stdout)
    (words,) = (each for each in shown if "serve" in each)
    assert f"NEURON_RT_VISIBLE_CORES=0-{2 * tp - 1}" in words
    kind = "logical cores" if tutorial == "trn2" else "NeuronCores"
    assert f"prefill on {kind} 0-{tp - 1}, decode on {tp}-{2 * tp - 1}" in text
    bench = shown_commands(run_step(EXAMPLES / tutorial / "6-bench.sh", "--dry-run").stdout)
    cores = [each[1].partition("=")[2] for each in bench if each[0] == "env"]
    assert cores == [f"0-{tp - 1}", f"{tp}-{2 * tp - 1}", f"0-{2 * tp - 1}"]
    assert re.search(rf"on {cores[0]}, and one\s+worker that does both on {cores[1]}", text)
    # A third worker: where the instance has cores left, else with the TP that the page names.
    other = {} if 3 * tp <= num_cores else {"TP": re.findall(r"export\s+TP=(\d+)", text)[0]}
    step = EXAMPLES / tutorial / "7-scale-out.sh"
    if other:
        assert run_step(step, "--dry-run").returncode == 2
    grown = run_step(step, "--dry-run", environ=other).stdout
    (cores,) = re.findall(r"NEURON_RT_VISIBLE_CORES=([\d-]+)", grown)
    section = text.partition("## 7. Scale out")[2].partition("## 8.")[0]
    assert re.search(rf"on cores {cores}\b|gets cores {cores}\b", section)


@tutorials
def test_the_table_of_two_hosts_is_that_of_the_settings(tutorial: str) -> None:
    rows = re.findall(
        r"^\| (10\.1\.0\.\d+) \|(?: ([\d-]+))? \| (.*?)(?:, (?:by step 7|during step 6))? \|$",
        text_of(tutorial),
        re.MULTILINE,
    )
    assert rows.pop(0) == ("10.1.0.11", "", "etcd, proxy")
    found = []
    for step in ("4-serve.sh", "6-bench.sh", "7-scale-out.sh"):
        output = run_step(EXAMPLES / tutorial / step, "--dry-run", "--hosts", HOSTS).stdout
        for words in shown_commands(output):
            if "--worker-id" in words:
                cores = next(w.partition("=")[2] for w in words if w.startswith("NEURON_RT_VIS"))
                host, name = (words[words.index(flag) + 1] for flag in ("--host", "--worker-id"))
                found.append((host, cores, name))
    assert rows == found


@tutorials
def test_ports_of_the_page_are_all_that_the_steps_use(tutorial: str) -> None:
    rows = re.findall(
        r"^\| +(\d+) \| (\w+)(?: \+ (\d))? \| .*? \| (.*?) \|$", text_of(tutorial), re.MULTILINE
    )
    chosen = settings(tutorial)
    for port, variable, more, _ in rows:
        assert int(port) == int(chosen[variable]) + int(more or 0)
    listed = {int(port) for port, *_ in rows}
    listed |= {int(port) for *_, who in rows for port in re.findall(r"\b90\d\d\b", who)}
    used = set()
    for step in steps_of(tutorial):
        # One host's step 6 has a port that several hosts' has not.
        shown = "".join(run_step(step, "--dry-run", *hosts).stdout for hosts in ([], WITH_HOSTS))
        used |= {int(port) for port in re.findall(r"(?::|PORT=|port )(\d{4,5})\b", shown)}
    used -= OF_THE_KERNELS_CHOICE
    assert used == listed
    # Nothing goes by Neuron's send and receive where there is no EFA.
    assert (45645 in listed) is (int(chosen["NUM_EFA"]) > 0)


def test_an_instance_without_efa_gets_one_interface_and_others_all(tmp_path: Path) -> None:
    for tutorial, num_cards in (("inf2", 1), ("trn2", 16)):
        environ = {"REGION": "r", "SUBNET": "s", "KEY_NAME": "k", "STATE": str(tmp_path)}
        shown = run_step(EXAMPLES / tutorial / "1-launch.sh", "--dry-run", environ=environ).stdout
        (order,) = (words for words in shown_commands(shown) if "run-instances" in words)
        cards = [word for word in order if word.startswith("NetworkCardIndex=")]
        assert len(cards) == num_cards
        num_efa = int(settings(tutorial)["NUM_EFA"])
        assert sum("InterfaceType=efa" in card for card in cards) == num_efa


# Layers, KV heads, dims of each, as the models' configurations have them.
SHAPES = {"trn1": (36, 8, 128), "inf2": (36, 8, 128), "trn2": (64, 8, 128)}


def kv_bytes(tutorial: str) -> int:
    layers, heads, dims = SHAPES[tutorial]
    return layers * heads * dims * 2 * 2  # keys and values, of two bytes each


def test_what_a_token_costs_between_two_inf2_is_right() -> None:
    text, num_bytes = text_of("inf2"), kv_bytes("inf2")
    assert f"= {num_bytes:,} bytes for each token" in text
    assert "by arithmetic and not measured" in text
    rows = re.findall(
        r"^\| (\d+).*? \| (\d+) Gbit/s \| (\d+) µs \| (\d+) ms \| (\d+) ms \|$", text, re.MULTILINE
    )
    assert [int(connections) for connections, *_ in rows] == [2, 10, 2]
    for row in rows:
        connections, gbits, token_us, short_ms, long_ms = map(int, row)
        assert gbits in (10 * connections, 5 * connections)
        seconds = num_bytes * 8 / (gbits * 1e9)
        assert [token_us, short_ms, long_ms] == [
            round(seconds * 1e6),
            round(seconds * 1024 * 1e3),
            round(seconds * 8192 * 1e3),
        ]
    assert f"{100e9 / 8 / num_bytes:,.0f} prompt tokens a second" in text
    environment = shown_commands(
        run_step(EXAMPLES / "inf2/4-serve.sh", "--dry-run", "--hosts", HOSTS).stdout
    )
    assert all(
        "NEURON_DI_TRANSFER_STREAMS=10" in words for words in environment if "--worker-id" in words
    )


@pytest.mark.parametrize("tutorial", ["trn1", "trn2"])
def test_what_a_prompt_costs_between_hosts_is_right(tutorial: str) -> None:
    text, num_bytes = " ".join(text_of(tutorial).split()), kv_bytes(tutorial)
    assert f"{num_bytes:,} bytes a token" in text
    assert f"{num_bytes * 1024 / 1e6:.0f} MB for a prompt of 1,024" in text
    two, ten = (num_bytes * 1024 * 8 / (n * 10e9) * 1e3 for n in (2, 10))
    assert f"take {two:.0f} ms for it, ten {ten:.0f} ms" in text


@pytest.mark.parametrize("name", ["systemd", "kubernetes"])
def test_the_operators_key_is_for_nobody_elses_eyes(name: str, tmp_path: Path) -> None:
    text = (COMMON / name / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "operator.key" in line and "$(" not in line]
    lines = [line for line in lines if not line.startswith("kubectl")]
    program = tmp_path / "neuron-di"
    program.write_text("#!/bin/sh\necho a-key\n")
    program.chmod(0o755)
    subprocess.run(
        ["bash", "-euc", "\n".join(["umask 022", *lines])],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "operator.key").read_text() == "a-key\n"
    assert (tmp_path / "operator.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["systemd", "kubernetes", "container"])
def test_a_page_gives_its_commands_in_the_repositorys_root(name: str) -> None:
    named = {
        word.lstrip("<")
        for command in page_commands(COMMON / name / "README.md")
        for word in command
        if re.match(r"<?examples/", word)
    }
    named |= {
        command[command.index("-k") + 1]
        for command in page_commands(COMMON / name / "README.md")
        if "-k" in command
    }
    assert named
    assert [word for word in named if not list(EXAMPLES.parent.glob(word))] == []


@pytest.mark.parametrize("name", ["systemd", "kubernetes"])
def test_whoever_makes_users_is_told_of_etcdctl(name: str, tmp_path: Path) -> None:
    assert "etcd-client" in (COMMON / name / "README.md").read_text(encoding="utf-8")
    (tmp_path / "sh").symlink_to("/bin/sh")
    done = subprocess.run(
        [tmp_path / "sh", EXAMPLES / "certificates/make_users.sh", "pki", "127.0.0.1:2379"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "sudo apt-get install etcd-client" in done.stderr


@tutorials
def test_instances_are_gone_before_their_groups_are_deleted(tutorial: str) -> None:
    orders = aws_orders(EXAMPLES / tutorial / "README.md")
    verbs = [words[2] for words in orders]
    gone = verbs.index("wait")
    assert orders[gone][3] == "instance-terminated"
    assert verbs[gone - 1] == "terminate-instances"
    assert {"delete-placement-group", "delete-security-group"} <= set(verbs[gone:])
    assert all("--region" in words for words in orders)
    has_addresses = int(settings(tutorial)["NUM_EFA"]) > 1
    assert ("release-address" in verbs) is has_addresses
    # The last step says the same, in the same order.
    said = run_step(EXAMPLES / tutorial / "8-drain.sh", "--dry-run").stdout
    told = [verb for verb in verbs[gone - 1 :] if not verb.startswith("describe-")]
    assert re.findall(r"^  aws ec2 ([a-z-]+)", said, re.MULTILINE) == told


@tutorials
def test_the_second_step_looks_at_the_ports_that_the_others_take(tutorial: str) -> None:
    def ports(step: str, *options: str) -> set[int]:
        shown = run_step(EXAMPLES / tutorial / step, "--dry-run", *options, environ={"TP": "4"})
        assert shown.returncode == 0, shown.stderr
        return {int(port) for port in re.findall(r"(?::|port )(\d{4,5})\b", shown.stdout)}

    one = (
        ports("4-serve.sh") | ports("6-bench.sh") | ports("7-scale-out.sh") - OF_THE_KERNELS_CHOICE
    )
    assert ports("2-check.sh") == one
    two = set[int]().union(*(ports(f"{step}.sh", *WITH_HOSTS) for step in SERVING))
    assert ports("2-check.sh", *WITH_HOSTS) == two


@tutorials
def test_all_steps_give_workers_the_same_environment(tutorial: str) -> None:
    """And the second one looks at it: Neuron's send and receive is by one port everywhere."""
    seen: dict[str, list[set[str]]] = {}
    for step in ("2-check.sh", "4-serve.sh", "6-bench.sh", "7-scale-out.sh"):
        for options in ([], WITH_HOSTS):
            environ = {"TP": "4", "BOOTSTRAP_PORT": "20645"}
            shown = run_step(EXAMPLES / tutorial / step, "--dry-run", *options, environ=environ)
            assert shown.returncode == 0, shown.stderr
            for command in shown_commands(shown.stdout):
                words = neuron_di_words(command)
                if words is not None and words[0] in ("doctor", "serve", "worker"):
                    given = {word for word in command if re.match(r"[A-Z_]+=", word)}
                    given = {word for word in given if not word.startswith(CORES_VARIABLE)}
                    seen.setdefault("hosts" if options else "host", []).append(given)
    for number in ("host", "hosts"):
        assert len(seen[number]) >= 4
        assert all(given == seen[number][0] != set() for given in seen[number])
    if int(settings(tutorial)["NUM_EFA"]):
        assert "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT=20645" in seen["host"][0]


def test_awss_own_command_line_takes_the_orders_of_the_page() -> None:
    if shutil.which("aws") is None:
        pytest.skip("aws is not installed")
    orders = aws_orders(EXAMPLES / "trn1/README.md")
    assert len(orders) == 10
    for order in orders:
        checked = check_aws([word.replace("$", "") for word in order])
        assert checked.returncode == 0, checked.stderr


def test_the_files_stay_small() -> None:
    files = [*(EXAMPLES / "trn1").glob("*.sh"), *(EXAMPLES / "neuron_common").glob("*.sh")]
    assert len(files) > 20
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 160, path.name
        assert max(map(len, lines)) <= 100, path.name
