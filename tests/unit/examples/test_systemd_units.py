"""The units are sound and harden what they start; neuron-di takes every variable of their files."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from manifest_kit import COMMON, parsed, settings

UNITS = COMMON / "systemd"
WORKER_FILES = ("prefill-0.env", "decode-0.env")
STARTED = ("neuron-di-proxy.service", "neuron-di-worker@prefill-0.service")


def variables(name: str) -> dict[str, str]:
    """As systemd reads an EnvironmentFile."""
    lines = (UNITS / name).read_text(encoding="utf-8").splitlines()
    said = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*=\S+", line) for line in said), said
    pairs = dict(line.split("=", 1) for line in said)
    assert len(pairs) == len(said)
    return pairs


def directives(name: str) -> dict[str, list[str]]:
    """Every directive of a unit, with each of its values in order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "neuron-di"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    for path in UNITS.glob("*.service"):
        text = path.read_text(encoding="utf-8")
        assert "/opt/neuron-di/bin/neuron-di " in text
        text = text.replace("/opt/neuron-di/bin/neuron-di", str(program))
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *STARTED],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["neuron-di-proxy.service", "neuron-di-worker@.service"])
def test_a_unit_gives_up_what_it_does_not_need(name: str) -> None:
    said = directives(name)
    assert said["CapabilityBoundingSet"] == [""]
    assert said["NoNewPrivileges"] == ["yes"]
    assert said["ProtectSystem"] == ["strict"]
    assert said["User"][0] not in ("root", "")
    users = (UNITS / "sysusers.conf").read_text(encoding="utf-8")
    assert re.search(rf"^u {said['User'][0]} ", users, re.MULTILINE)


def test_a_worker_has_the_accelerators_and_may_lock_memory() -> None:
    said = directives("neuron-di-worker@.service")
    assert said["DevicePolicy"] == ["closed"]
    assert said["DeviceAllow"] == ["char-neuron rw", "char-infiniband_verbs rw"]
    assert said["LimitMEMLOCK"] == ["infinity"]
    # All of a host meet at a lock file of the runtime's.
    assert "PrivateTmp" not in said
    assert said["ReadWritePaths"] == ["/tmp"]


def test_a_worker_finds_the_compiler_beside_neuron_di() -> None:
    said = directives("neuron-di-worker@.service")
    (program,) = said["ExecStart"]
    (path,) = (line for line in said["Environment"] if line.startswith("PATH="))
    assert path.removeprefix("PATH=").split(":")[0] == program.rpartition("/bin/")[0] + "/bin"


def test_time_to_drain_is_given() -> None:
    for unit, file in [
        ("neuron-di-proxy.service", "proxy.env"),
        ("neuron-di-worker@.service", "worker.env"),
    ]:
        (stop_s,) = directives(unit)["TimeoutStopSec"]
        assert int(stop_s) > float(variables(file)["NEURON_DI_DRAIN_TIMEOUT_S"])


def test_neuron_di_takes_the_proxys_variables() -> None:
    (command,) = directives("neuron-di-proxy.service")["ExecStart"]
    made = parsed(command.split()[1:], variables("proxy.env"))
    chosen = settings("trn1")
    assert made.port == int(chosen["PROXY_PORT"])
    assert made.etcd.etcd == (f"10.1.0.11:{chosen['ETCD_PORT']}",)
    low, high = made.addresses.worker_ports.split("-")
    for name in WORKER_FILES:
        assert int(low) <= int(variables(name)["NEURON_DI_PORT"]) <= int(high)


def test_neuron_di_takes_the_workers_variables_and_each_has_its_own_of_all() -> None:
    (command,) = directives("neuron-di-worker@.service")["ExecStart"]
    files = [path.name for path in UNITS.glob("*-?.env")]
    assert sorted(files) == sorted(WORKER_FILES)
    chosen, cores, ports = settings("trn1"), set[int](), set[int]()
    for slot, name in enumerate(WORKER_FILES):
        words = command.replace("%l-%i", f"host-{name.removesuffix('.env')}").split()[1:]
        said = variables("worker.env") | variables(name)
        made = parsed(words, said)
        assert made.role == name.partition("-")[0]
        first, last = map(int, said["NEURON_RT_VISIBLE_CORES"].split("-"))
        own = set(range(first, last + 1))
        assert len(own) == made.engine.tp == int(chosen["TP"])
        assert not own & cores
        assert max(own) < int(chosen["NUM_CORES"])
        cores |= own
        expected = [int(chosen["WORKER_PORT"]) + 10 * slot + offset for offset in range(4)]
        transfer = made.kv_transfer
        assert expected == [
            made.port,
            made.signal_port,
            transfer.transfer_port,
            transfer.nrt_control_port,
        ]
        ports |= set(expected)
        assert said["NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT"] == chosen["BOOTSTRAP_PORT"]
        assert made.etcd.etcd == (f"10.1.0.11:{chosen['ETCD_PORT']}",)
    readme = (UNITS / "README.md").read_text(encoding="utf-8")
    table = " ".join(re.findall(r"^\| ([\d, …]+) \|", readme, re.MULTILINE))
    assert {str(port) for port in ports} <= set(re.findall(r"\d+", table))


def test_etcd_knows_every_variable_of_its_file() -> None:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: run .ci/install-etcd")
    done = subprocess.run(
        ["etcd", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    flags = set(re.findall(r"^\s+--([a-z-]+)", done.stdout + done.stderr, re.MULTILINE))
    assert "listen-client-urls" in flags
    names = variables("etcd.default")
    assert {name.removeprefix("ETCD_").lower().replace("_", "-") for name in names} <= flags
    assert all(name.startswith("ETCD_") for name in names)
