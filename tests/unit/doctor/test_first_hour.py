"""The first hour, really run: on the simulator of libnrt and the stand-in for NxD Inference.

Two processes on two cores send and receive, one of them is killed, a compiled model's KV is looked
at and its steps are timed. What is measured here says nothing of hardware.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from neuron_machines import fi_info, instance, laptop, log_line, machine, options, simulated
from test_doctor_neuron_memory import holding

from neuron_di.doctor import first_hour_runtime, first_hour_transfers
from neuron_di.doctor.first_hour import write_report
from neuron_di.doctor.first_hour_transfers import Bench
from neuron_di.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples/models/tiny-tales"
HOME = "/".join(["", "home", "alice-of-lab"])
SECRETS = {
    "USER": "alice-of-lab",
    "LOGNAME": "alice-of-lab",
    "HOME": HOME,
    "HOSTNAME": "trn-7.lab.example",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "NEURON_DI_ETCD_PASSWORD_FILE": f"{HOME}/etcd-password",
    "NEURON_RT_ROOT_COMM_ID": "10.9.8.7:62182",
    "FI_LOG_LEVEL": "info on 10.9.8.6 for alice-of-lab",
}
LEAKS = (
    *("alice", "lab.example", "trn-7", "wJalr", "hf_abc", "etcd-password", "10.9.8."),
    *(str(ROOT), socket.gethostname()),
)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Nothing happens to requests on the simulator, however long they are watched."""
    monkeypatch.setattr(first_hour_transfers, "WATCH_S", 0.5)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A model compiled by the stand-in, for one core."""
    folder = tmp_path_factory.mktemp("artifacts")
    command = [sys.executable, "-m", "neuron_di", "compile", str(MODEL), "--tp", "1"]
    command += ["--dtype", "float32", "--context-tokens", "128", "--decode-batch", "2"]
    subprocess.run(
        [*command, "--neuron-artifacts", str(folder)],
        env=stand_in(folder.parent / "sim"),
        capture_output=True,
        check=True,
        timeout=100,
    )
    return folder


def stand_in(folder, **variables):
    """The simulator's environment, with the packages that stand for NxD Inference."""
    environment = simulated(folder, **variables)
    paths = [str(ROOT / "tests/neuron_stand_in"), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def written(path):
    """(the whole text, the JSON in it)."""
    text = path.read_text()
    (block,) = re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return text, json.loads(block)


def outcomes_of(document):
    return {point["number"]: point["outcome"] for point in document["points"]}


def test_on_a_simulated_host_with_a_compiled_model(tmp_path, artifacts, capsys):
    environment = stand_in(tmp_path / "sim") | SECRETS
    environment["NEURON_DI_NEURON_ARTIFACTS"] = str(artifacts)
    path = tmp_path / "first-hour.md"
    looked_at = machine(laptop(tmp_path / "root"), environment)
    assert write_report(looked_at, options(), path) == 0
    text, document = written(path)
    assert [leak for leak in LEAKS if len(leak) > 2 and leak in text] == []
    assert outcomes_of(document) == {
        1: "ok",
        2: "ok",
        3: "skipped",
        4: "ok",
        5: "skipped",
        6: "ok",
        7: "ok",
        8: "ok",
    }
    assert document["is_simulated"]
    assert "it says nothing of hardware" in text
    points = {point["number"]: point["facts"] for point in document["points"]}
    assert points[1]["version"] == "2.32.31.0", "a version is no address"
    assert {name for name in points[1]["exports"]["unknown"] if "sim" not in name} == set()
    assert points[1]["exports"]["absent"] == ["nrt_get_dmabuf_fd_v2"]
    assert points[2]["opens_without_gates"] is False
    assert points[2]["steps"]["limits"] == {"communicators_max": 128, "pending_max": 128}
    assert points[4]["torch_engine"] is False
    (rank,) = points[4]["ranks"]
    assert rank["efa"] == "0000:a0:19.0"
    assert (rank["has_address"], rank["dmabuf"], rank["has_handle"]) == (True, "ok", True)
    assert points[6]["alone"]["steps"] == points[6]["beside_a_transfer"]["steps"] == 32
    assert points[6]["beside_a_transfer"]["bytes_per_s"] > 0
    for side in ("receives", "sends"):
        assert points[7][side]["kill"]["outcomes"] == ["still posted"] * 4
        assert "4 requests posted" in points[7][side]["leave"]["close"]
    assert set(points[7]["cores_after"].values()) == {"ok"}
    flush = points[8]["flush"]
    assert (flush["there_before_flush"], flush["there_after_flush"]) == (0, 16)
    assert points[8]["bytes"]["sizes"] == [4096, 1 << 20, 16 << 20]
    said = capsys.readouterr().out
    assert "8 of 8  ok" in said
    assert str(path) in said
    with holding(environment, "0-31"):
        pass  # no process of it is left


def test_on_a_trn1_without_a_model(tmp_path):
    """Everything that a real machine has is there but the devices: the simulator is asked."""
    root = instance(tmp_path / "root", "trn1.32xlarge")
    root.file("/etc/os-release", 'PRETTY_NAME="Ubuntu 24.04 LTS"\n')
    domains = [path.name for path in (root.folder / "sys/class/infiniband").iterdir()]
    log = log_line("number of neuron cores: 32 on 10.9.8.7")
    path = fi_info(tmp_path / "bin", domains, log=log)
    environment = stand_in(tmp_path / "sim") | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path)}
    report = tmp_path / "report.md"
    has_failed = write_report(machine(root, environment), options(), report)
    text, document = written(report)
    outcomes = outcomes_of(document)
    assert has_failed == (outcomes[5] == "failed")
    assert outcomes.pop(5) in ("failed", "skipped"), "as NIXL is installed, or not"
    assert outcomes == {1: "ok", 2: "ok", 3: "ok", 4: "skipped", 6: "skipped", 7: "ok", 8: "ok"}
    assert "10.9.8." not in text
    assert document["instance"] == "trn1.32xlarge"
    assert "neuron-di compile MODEL" in document["points"][3]["answer"]
    grades = {finding["check"]: finding["grade"] for finding in document["findings"]}
    assert grades["efa.pairs"] == grades["neuron.pair"] == "ok"
    assert "Ubuntu 24.04 LTS" in text


def test_send_and_receive_that_does_not_open(tmp_path):
    fault = "function=nrt_async_sendrecv_init status=1 sticky"
    environment = stand_in(tmp_path / "sim", NRT_SIM_FAULTS=fault, XDG_CACHE_HOME=str(tmp_path))
    report = tmp_path / "report.md"
    looked_at = machine(laptop(tmp_path / "root"), environment)
    assert write_report(looked_at, options(), report) == 1
    _, document = written(report)
    outcomes = outcomes_of(document)
    assert (outcomes[2], outcomes[7], outcomes[8]) == ("failed", "skipped", "skipped")
    variants = document["points"][1]["facts"]["variants"]
    assert {"FI_PROVIDER", "FI_HMEM", "NEURON_RT_ROOT_COMM_ID", "all of them"} <= set(variants)
    assert all("NRT_FAILURE" in said for said in variants.values())


def test_what_it_needs_to_open_is_found_and_used_from_there_on(tmp_path, monkeypatch):
    """Here it takes a variable that ends the simulator's fault."""
    needed = {"FI_PROVIDER": {"FI_PROVIDER": "efa"}, "CALM": {"NRT_SIM_FAULTS": ""}}
    monkeypatch.setattr(first_hour_runtime, "VARIANTS", needed)
    fault = "function=nrt_async_sendrecv_init status=1 sticky"
    environment = stand_in(tmp_path / "sim", NRT_SIM_FAULTS=fault, XDG_CACHE_HOME=str(tmp_path))
    report = tmp_path / "report.md"
    looked_at = machine(laptop(tmp_path / "root"), environment)
    assert write_report(looked_at, options(), report) == 0
    _, document = written(report)
    outcomes = outcomes_of(document)
    assert (outcomes[2], outcomes[7], outcomes[8]) == ("note", "ok", "ok")
    assert "It opens with CALM or all of them" in document["points"][1]["answer"]


def test_an_instance_without_efa_fails_nothing(tmp_path, artifacts):
    environment = stand_in(tmp_path / "sim", NRT_SIM_INSTANCE="inf2.48xlarge")
    environment["NEURON_DI_NEURON_ARTIFACTS"] = str(artifacts)
    report = tmp_path / "report.md"
    looked_at = machine(instance(tmp_path / "root", "inf2.48xlarge"), environment)
    assert write_report(looked_at, options(), report) == 0
    _, document = written(report)
    outcomes = outcomes_of(document)
    assert (outcomes[2], outcomes[4]) == ("note", "note")
    assert {outcomes[number] for number in (3, 5, 6, 7, 8)} == {"skipped"}
    assert document["points"][5]["facts"]["alone"]["steps"] == 32


def test_cores_that_others_have_are_left_to_them(tmp_path):
    environment = stand_in(tmp_path / "sim", XDG_CACHE_HOME=str(tmp_path))
    report = tmp_path / "report.md"
    with holding(environment, "0-31"):
        looked_at = machine(laptop(tmp_path / "root"), environment)
        assert write_report(looked_at, options(), report) == 0
    outcomes = outcomes_of(written(report)[1])
    assert outcomes.pop(1) == "ok"
    assert set(outcomes.values()) == {"skipped"}


def test_a_single_core_that_is_free(tmp_path):
    environment = stand_in(tmp_path / "sim", NEURON_RT_VISIBLE_CORES="5")
    report = tmp_path / "report.md"
    assert write_report(machine(laptop(tmp_path / "root"), environment), options(), report) == 0
    outcomes = outcomes_of(written(report)[1])
    assert outcomes[2] == "ok"
    assert {outcomes[number] for number in (4, 5, 6, 7, 8)} == {"skipped"}


def test_a_model_whose_cores_others_have_is_skipped(tmp_path, artifacts):
    environment = stand_in(tmp_path / "sim", NEURON_DI_NEURON_ARTIFACTS=str(artifacts))
    looked_at = machine(laptop(tmp_path / "root"), environment)
    with holding(environment, "28"):
        bench = Bench(machine=looked_at, options=options(), total=29, cores=(31, 30))
        points = first_hour_transfers.model(bench)
    assert [point.outcome for point in points] == ["skipped", "skipped"]
    assert "Other processes have some of the NeuronCores 28" in points[0].answer


def test_what_was_answered_is_there_however_it_ends(tmp_path, monkeypatch):
    environment = stand_in(tmp_path / "sim", NEURON_RT_VISIBLE_CORES="5")
    monkeypatch.setattr("neuron_di.doctor.first_hour.run_check", interrupted)
    report = tmp_path / "report.md"
    with pytest.raises(KeyboardInterrupt):
        write_report(machine(laptop(tmp_path / "root"), environment), options(), report)
    assert len(outcomes_of(written(report)[1])) == 8
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.md"]


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_tried(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(machine(laptop(tmp_path / "root"), {}), options(), tmp_path / "file/report.md")


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    path = tmp_path / "reprots" / "report.md"
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        write_report(machine(laptop(tmp_path / "root"), {}), options(), path)
    assert not path.parent.exists()


def test_nothing_but_a_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("pipe", "device", "circle"):
        with pytest.raises(ConfigError, match=name):
            write_report(machine(laptop(tmp_path / "root"), {}), options(), tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "device").is_char_device()


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    environment = {"PATH": os.environ["PATH"], "NEURON_DI_LIBNRT": "/nowhere"}
    link = tmp_path / "link.md"
    link.symlink_to("report.md")
    assert write_report(machine(laptop(tmp_path / "root"), environment), options(), link) == 1
    assert link.is_symlink()
    assert len(outcomes_of(written(tmp_path / "report.md")[1])) == 8


def test_a_disk_that_is_full_has_no_half_report(tmp_path):
    """A file may have so few bytes here, which is told in the same way."""
    script = """if True:
        import os, pathlib
        from neuron_di.doctor.finding import Grade
        from neuron_di.doctor.first_hour_point import Point
        from neuron_di.doctor.first_hour_report import write
        from neuron_di.doctor.machine import Machine
        try:
            write(pathlib.Path("report.md"), Machine(), [Point(1, Grade.OK, "x" * 100_000)], [])
        except OSError:
            print(os.listdir())"""
    limited = ("sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable, "-B", "-c", script)
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_writes_it_without_any_neuron(tmp_path):
    """A laptop: a report all the same, which says that there is nothing."""
    report = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, "-m", "neuron_di", "doctor", "--first-hour", str(report)],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NEURON_DI_LIBNRT": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    outcomes = outcomes_of(written(report)[1])
    assert outcomes.pop(1) == "failed"
    assert set(outcomes.values()) == {"skipped"}
