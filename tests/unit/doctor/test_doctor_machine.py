"""What checks look at: files below a root, programs of a PATH, packages of a folder."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from machine_kit import make_machine, make_package, make_program

from neuron_di.doctor.machine import FILE_BYTES_MAX, OUTPUT_BYTES_MAX, Machine


def test_files_are_read_below_the_root(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, {"/sys/module/neuron/version": " 2.21.37.0\n"})
    assert machine.read("/sys/module/neuron/version") == "2.21.37.0"
    assert machine.read("/sys/module/neuron") is None  # a folder
    assert machine.read("/sys/module/other/version") is None
    assert Machine().read("/proc/sys/kernel/osrelease") == os.uname().release


def test_of_a_large_file_only_the_beginning_is_read(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, {"/large": "x" * (FILE_BYTES_MAX + 1)})
    assert machine.read("/large") == "x" * FILE_BYTES_MAX


def test_names_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    root = tmp_path / "a [root] with* a pattern's letters"
    files = {f"/dev/neuron{number}": "" for number in (10, 2, 0, 1)}
    machine = make_machine(root, files)
    expected = ["/dev/neuron0", "/dev/neuron1", "/dev/neuron2", "/dev/neuron10"]
    assert machine.names("/dev/neuron[0-9]*") == expected
    assert machine.names("/dev/neuron1") == ["/dev/neuron1"]
    assert machine.names("/dev/nothing*") == []


def test_a_link_is_followed_below_the_root(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, {"/sys/devices/pci/0000:10:00.0/vendor": "0x1d0f\n"})
    folder = tmp_path / "sys/class/infiniband/rdmap0"
    folder.mkdir(parents=True)
    (folder / "device").symlink_to("../../../devices/pci/0000:10:00.0")
    (folder / "broken").symlink_to("../nowhere")
    path = "/sys/class/infiniband/rdmap0/device"
    assert machine.target(path) == "/sys/devices/pci/0000:10:00.0"
    assert machine.read(f"{path}/vendor") == "0x1d0f"
    assert machine.link(path) == "../../../devices/pci/0000:10:00.0"
    assert machine.target("/sys/class/infiniband/rdmap0/broken") is None
    assert machine.link("/sys/class/infiniband/rdmap0/nothing") is None


def test_the_room_of_a_file_system_is_known(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    room = machine.room("/tmp")
    assert room is not None
    assert 0 < room.free_bytes <= room.num_bytes
    assert machine.room("/nothing") is None


def test_a_program_is_found_by_path_and_gets_the_environment(tmp_path: Path) -> None:
    make_program(tmp_path / "bin", "fi_info", 'echo "$1 $FI_HMEM"; echo no >&2; exit 3')
    environment = {"PATH": f"{tmp_path}/bin", "FI_HMEM": "neuron"}
    machine = make_machine(tmp_path, environment=environment)
    ran = machine.run("fi_info", "-p", timeout_s=30)
    assert ran is not None
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "-p neuron\n", "no\n")
    assert not ran.has_timed_out
    assert machine.run("fi_pingpong", timeout_s=30) is None


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    make_program(tmp_path / "bin", "hangs", "echo $$; exec sleep 600")
    machine = make_machine(tmp_path, environment={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    ran = machine.run("hangs", timeout_s=1)
    assert ran is not None
    assert (ran.returncode, ran.has_timed_out) == (-signal.SIGKILL, True)
    assert not psutil.pid_exists(int(ran.stdout))


def test_a_program_that_leaves_a_child_with_its_output_is_not_waited_for(tmp_path: Path) -> None:
    make_program(tmp_path / "bin", "leaves", "sleep 600 & echo $!")
    machine = make_machine(tmp_path, environment={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    ran = machine.run("leaves", timeout_s=600)
    assert ran is not None
    assert (ran.returncode, ran.has_timed_out) == (0, False)
    os.kill(int(ran.stdout), signal.SIGKILL)


def test_what_a_program_writes_is_bounded(tmp_path: Path) -> None:
    make_program(tmp_path / "bin", "talks", f"yes | head -c {OUTPUT_BYTES_MAX + 100_000}; exit 5")
    machine = make_machine(tmp_path, environment={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    ran = machine.run("talks", timeout_s=60)
    assert ran is not None
    assert (ran.returncode, len(ran.stdout)) == (5, OUTPUT_BYTES_MAX)


def test_a_program_of_another_kind_of_machine_is_said_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "alien").write_bytes(b"\x7fELF of another processor")
    (tmp_path / "bin" / "alien").chmod(0o755)
    ran = make_machine(tmp_path, environment={"PATH": f"{tmp_path}/bin"}).run("alien", timeout_s=30)
    assert ran is not None
    assert ran.returncode == 127
    assert ran.stderr


def test_packages_are_those_of_the_folders(tmp_path: Path) -> None:
    make_package(tmp_path / "site", "torch-neuronx", "2.9.0.2.11")
    make_package(tmp_path / "site", "neuronx_cc", "2.24.1")
    (tmp_path / "site" / "left_behind-1.0.dist-info").mkdir()
    machine = make_machine(tmp_path, package_path=[str(tmp_path / "site")])
    assert machine.package("torch-neuronx") == "2.9.0.2.11"
    assert machine.package("neuronx-cc") == "2.24.1"
    assert machine.package("torch") is None
    assert machine.package("left-behind") is None
    assert sorted(each.name for each in machine.distributions()) == ["neuronx_cc", "torch-neuronx"]
    assert Machine().package("pytest") == pytest.__version__


def test_our_keys_are_not_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_NEURON_DI", "secret")
    assert "KEY_NEURON_DI" not in Machine().environment
