"""Settings of the Neuron tutorials that cannot be meant are refused at once, and by every step."""

import re
from pathlib import Path

import pytest
from manifest_kit import COMMON
from tutorial_kit import EXAMPLES, HOSTS, copied, run_step, steps_of

TRN1 = EXAMPLES / "trn1"
TUTORIALS = ("trn1", "inf2", "trn2")
FILES = [
    *(COMMON / f"{name}.sh" for name in ("defaults", "ports", "simulator")),
    *(EXAMPLES / name / "settings.sh" for name in TUTORIALS),
]
SETTING = re.compile(r'^: "\$\{(\w+):=(.*)\}"', re.MULTILINE)
NUMBERS = sorted(
    {
        name
        for path in FILES
        for name, value in SETTING.findall(path.read_text(encoding="utf-8"))
        if re.fullmatch(r"\d+|\$PORT_BASE|\$\(\(PORT_BASE.*", value)
    }
)
MODES = pytest.mark.parametrize("mode", [[], ["--dry-run"], ["--simulate"]], ids=str)


def refused(step: Path, *options: str, state: Path, **environ: str) -> str:
    """What a step says that refuses a setting. It has neither done nor shown anything."""
    ended = run_step(step, *options, environ={"STATE": str(state)} | environ)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stdout == ""
    assert not state.exists()
    return ended.stderr


def test_the_numbers_are_those_that_one_would_expect() -> None:
    some = {"COUNT", "DECODE_BATCH", "DISK_GIB", "NUM_EFA", "PORT_BASE", "PROXY_PORT", "TP"}
    assert some < set(NUMBERS)
    assert len(NUMBERS) >= 17


@MODES
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_a_number_takes_no_word(name: str, mode: list[str], tmp_path: Path) -> None:
    said = refused(TRN1 / "4-serve.sh", *mode, state=tmp_path / "state", **{name: "abc"})
    assert re.match(rf"4-serve\.sh: {name}=abc is no number from [01] to \d+; --help ", said)


@MODES
@pytest.mark.parametrize("step", steps_of("trn1"), ids=lambda step: step.stem)
def test_every_step_refuses_it(step: Path, mode: list[str], tmp_path: Path) -> None:
    said = refused(step, *mode, state=tmp_path / "state", PORT_BASE="abc")
    assert said.startswith(f"{step.name}: PORT_BASE=abc is no number from 1 to 65000;")


@MODES
@pytest.mark.parametrize("tutorial", TUTORIALS)
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TP", "08", "is no number from 1 to"),
        ("TP", "0", "is no number from 1 to"),
        ("TP", "-1", "is no number from 1 to"),
        ("PROXY_PORT", "99999", "is no number from 0 to 65535"),
        ("DTYPE", "int8", "is not auto, float32, bfloat16 or float16"),
        ("MORE_EFA", "ena", "is not efa or efa-only"),
        ("SDK", "latest", "is not a release, such as 2.28"),
        ("IMAGE", "ubuntu", "is not ami-…, or empty"),
        ("RESERVATION", "mine", "is not cr-…, or empty"),
        ("IS_CAPACITY_BLOCK", "no", "is not yes, or empty"),
        ("SSH_FROM", "203.0.113.7", "is not a network, such as 203.0.113.7/32, or empty"),
    ],
)
def test_it_says_what_a_setting_must_be(
    tutorial: str, name: str, value: str, says: str, mode: list[str], tmp_path: Path
) -> None:
    step = EXAMPLES / tutorial / "4-serve.sh"
    said = refused(step, *mode, state=tmp_path / "state", **{name: value})
    assert said.startswith(f"4-serve.sh: {name}={value} {says}")


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ("--requests many", "--requests many, and that is not a whole number"),
        ("--requests 1.5", "--requests 1.5, and that is not a whole number"),
        ("--rate fast", "--rate fast, and that is not a number"),
        ("100", "100, and that is not a flag of neuron-di bench"),
        ("--rate 4 5", "5, and that is not a flag of neuron-di bench"),
    ],
)
def test_the_load_of_step_6_is_looked_at_before_a_server_stops(
    load: str, says: str, tmp_path: Path
) -> None:
    said = refused(TRN1 / "6-bench.sh", state=tmp_path / "state", BENCH_LOAD=load)
    assert said.startswith(f"6-bench.sh: BENCH_LOAD has {says};")


@pytest.mark.parametrize(
    "load",
    ["--rate 4 --requests 200", "--rate inf --no-ignore-eos --seed 2", "--rate .5", "--trace a"],
)
def test_other_loads_are_taken(load: str) -> None:
    ended = run_step(TRN1 / "6-bench.sh", "--dry-run", environ={"BENCH_LOAD": load})
    assert ended.returncode == 0, ended.stderr
    assert load in ended.stdout.replace(" \\\n   ", "")


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        (
            "prefill-0 prefil 0 0",
            "the worker 'prefill-0 prefil 0 0' is not NAME prefill|decode|both",
        ),
        ("prefill-0 prefill a 0", "HOST SLOT, the last two numbers"),
        ("prefill-0 prefill 0", "HOST SLOT, the last two numbers"),
        ("prefill-0 prefill 2 0", "prefill-0 is on host 2, and --hosts has 0 to 1"),
        ("decode-1 prefill 0 0", "the worker decode-1 is there twice"),
        ("prefill-0 prefill 1 1", "decode-1 has a slot of host 1 that another one has: 1"),
    ],
)
def test_lines_of_workers_are_looked_at(workers: str, says: str, tmp_path: Path) -> None:
    folder = copied("trn1", tmp_path)
    settings = folder / "settings.sh"
    text = settings.read_text()
    assert '("prefill-0 prefill 0 0" "decode-0' in text
    settings.write_text(text.replace("prefill-0 prefill 0 0", workers))
    said = refused(folder / "4-serve.sh", "--hosts", HOSTS, state=tmp_path / "state")
    assert says in said


def test_each_setting_has_one_place() -> None:
    """But for what --simulate takes in its place; ports differ nowhere."""
    common = {
        name
        for path in (COMMON / "defaults.sh", COMMON / "ports.sh")
        for name, _ in SETTING.findall(path.read_text(encoding="utf-8"))
    }
    assert len(common) > 20
    values: dict[str, set[str]] = {}
    for tutorial in TUTORIALS:
        text = (EXAMPLES / tutorial / "settings.sh").read_text(encoding="utf-8")
        for name, value in SETTING.findall(text):
            values.setdefault(name, set()).add(value)
    # What a tutorial says again is another value; what all say differs somewhere.
    assert common & set(values) == {"DISK_GIB"}
    assert values["DISK_GIB"] == {"1000"}
    assert [name for name, said in values.items() if len(said) == 1 and name != "DISK_GIB"] == []
