"""What the page of the trn1 tutorial says is what there is: commands, ports, files, settings."""

import re
import shutil

import pytest
from tutorial_kit import (
    EXAMPLES,
    HOSTS,
    check_aws,
    neuron_di_words,
    page_commands,
    real_parser,
    run_step,
    shown_commands,
    steps_of,
)

TRN1 = EXAMPLES / "trn1"
PAGE = TRN1 / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_it_says_first_that_nothing_has_run_on_hardware() -> None:
    first = TEXT.split("\n\n")[1]
    assert first.startswith("**Nothing on this page has run on Trainium.**")


def test_it_names_every_step_and_what_it_links_to_is_there() -> None:
    table = re.findall(r"^\| \[([\w.-]+)\]\(\1\)", TEXT, re.M)
    assert sorted(table) == sorted(step.name for step in steps_of("trn1"))
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 12
    for link in links:
        name, _, anchor = link.partition("#")
        target = TRN1 / name if name else PAGE
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


def test_its_commands_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = real_parser(monkeypatch)
    commands = page_commands(PAGE)
    inline = re.findall(r"`(neuron-di [a-z-]+ [^`]+)`", TEXT)
    taken = [words for words in map(neuron_di_words, [*commands, *map(str.split, inline)]) if words]
    assert len(taken) >= 2
    for words in taken:
        accept(words)
    steps = [
        [word for word in words if not re.match(r"[A-Z_]+=", word)]
        for words in commands
        if any(word.startswith("./") and word.endswith(".sh") for word in words)
    ]
    assert len(steps) >= 15
    for step, *options in (words for words in steps if words[0].startswith("./")):
        if "$" not in step:
            assert (TRN1 / step).is_file(), step
        assert set(options) <= {"--dry-run", "--simulate"}, options


def test_awss_own_command_line_takes_its_orders() -> None:
    if shutil.which("aws") is None:
        pytest.skip("aws is not installed")
    orders = {words[2]: words for words in page_commands(PAGE) if words[0] == "aws"}
    assert len(orders) == 8
    for verb in ("describe-instances", "associate-address", "wait", "delete-security-group"):
        checked = check_aws([word.replace("$", "") for word in orders[verb]])
        assert checked.returncode == 0, checked.stderr


def test_its_ports_are_those_that_the_steps_use() -> None:
    rows = re.findall(r"^\| +(\d+) \| (\w+)(?: \+ (\d))? \| (.*?) \| (.*?) \|$", TEXT, re.M)
    assert len(rows) == 10
    ports = (EXAMPLES / "neuron_common/ports.sh").read_text(encoding="utf-8")
    defaults = dict(re.findall(r'^: "\$\{(\w+):=(\d+)\}"', ports, re.M))
    assert {variable for _, variable, *_ in rows} == set(defaults)
    for port, variable, more, *_ in rows:
        assert int(port) == int(defaults[variable]) + int(more or 0)
    told = {int(port) for port, *_ in rows}
    told |= {int(port) for _, _, _, _, who in rows for port in re.findall(r"\b90\d\d\b", who)}
    used = set()
    for step in steps_of("trn1"):
        options = [] if "bench" in step.name else ["--hosts", HOSTS]
        shown = run_step(step, "--dry-run", *options).stdout
        used |= {int(port) for port in re.findall(r"(?::|PORT=|port )(\d{4,5})\b", shown)}
    assert used == told


def test_its_table_of_two_hosts_is_that_of_the_settings() -> None:
    rows = re.findall(
        r"^\| (10\.1\.0\.\d+) \|(?: ([\d-]+))? \| (.*?)(?:, by step 7)? \|$", TEXT, re.M
    )
    assert rows.pop(0) == ("10.1.0.11", "", "etcd, proxy")
    found = []
    for step in ("4-serve.sh", "7-scale-out.sh"):
        for words in shown_commands(run_step(TRN1 / step, "--dry-run", "--hosts", HOSTS).stdout):
            if "--worker-id" in words:
                cores = next(w.partition("=")[2] for w in words if w.startswith("NEURON_RT_VIS"))
                host, name = (words[words.index(flag) + 1] for flag in ("--host", "--worker-id"))
                found.append((host, cores, name))
    assert rows == found


def test_one_host_has_prefill_and_decode_on_the_cores_that_it_says() -> None:
    """`serve` divides its cores in the order of roles: half of them for prefill."""
    (words,) = shown_commands(run_step(TRN1 / "4-serve.sh", "--dry-run").stdout)
    assert words[1] == "NEURON_RT_VISIBLE_CORES=0-31"
    assert words[words.index("--tp") + 1] == "16"
    assert "prefill on NeuronCores 0-15, decode on 16-31" in TEXT
    bench = shown_commands(run_step(TRN1 / "6-bench.sh", "--dry-run").stdout)
    cores = [words[1] for words in bench if words[0] == "env"]
    assert cores == [f"NEURON_RT_VISIBLE_CORES={cores}" for cores in ("0-15", "16-31", "0-31")]


def test_its_arithmetic_is_right() -> None:
    num_bytes = 36 * 2 * 8 * 128 * 2
    assert f"{num_bytes:,} bytes a\ntoken" in TEXT
    prompt = num_bytes * 1024
    assert f"{prompt / 1e6:.0f} MB for a prompt of 1,024" in TEXT
    two, ten = (prompt * 8 / (connections * 10e9) * 1e3 for connections in (2, 10))
    assert f"take {two:.0f} ms for it, ten {ten:.0f} ms" in TEXT
    assert 10 * 10e9 == 100e9  # the card's own speed


def test_the_files_stay_small() -> None:
    files = [*TRN1.glob("*.sh"), *(EXAMPLES / "neuron_common").glob("*.sh")]
    assert len(files) > 20
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 160, path.name
        assert max(map(len, lines)) <= 100, path.name
    for path in TRN1.glob("*.md"):
        assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120


def test_every_step_stops_at_an_error() -> None:
    for step in steps_of("trn1"):
        assert "set -euo pipefail" in step.read_text(encoding="utf-8"), step.name
        assert step.stat().st_mode & 0o111, step.name
