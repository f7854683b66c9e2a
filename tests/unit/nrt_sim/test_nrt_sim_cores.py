"""The simulator of libnrt: instances, counts, and which process owns which core."""

import os
import signal
import subprocess
import sys
from ctypes import byref, c_size_t, c_uint32, create_string_buffer, sizeof
from pathlib import Path

import pytest
from nrt_sim import plain
from nrt_sim.plain import (
    FAILURE,
    INVALID,
    NC_BUSY,
    NO_FRAMEWORK,
    RESOURCE,
    SUCCESS,
    InstanceInfo,
    MemoryStats,
)

COUNTS = tuple(
    f"nrt_get_{which}_{kind}_count" for kind in ("vnc", "nc") for which in ("total", "visible")
)


@pytest.mark.parametrize(
    ("instance", "lnc", "count", "family", "size", "arch"),
    [
        ("trn1.2xlarge", "", 2, 2, 1, b"trn1"),
        ("trn1.32xlarge", "", 32, 2, 6, b"trn1"),
        ("inf2.48xlarge", "1", 24, 4, 7, b"inf2"),
        ("trn2.48xlarge", "", 64, 5, 7, b"trn2"),
        ("trn2.48xlarge", "1", 128, 5, 7, b"trn2"),
    ],
)
def test_an_instance_says_what_it_is_before_and_after_init(
    load, monkeypatch, instance, lnc, count, family, size, arch
):
    """The older names of the counts count virtual cores, too."""
    monkeypatch.setenv("NRT_SIM_INSTANCE", instance)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    nrt = load()
    for start in (lambda: None, nrt.open):
        start()
        assert [nrt.count(name) for name in COUNTS] == [count] * 4
        info = InstanceInfo()
        assert nrt.nrt_get_instance_info(byref(info), sizeof(info)) == SUCCESS
        assert (info.family, info.size, info.arch_name) == (family, size, arch)
    for num_bytes in (sizeof(info) - 1, sizeof(info) + 1):
        assert nrt.nrt_get_instance_info(byref(info), num_bytes) == INVALID
    assert [getattr(nrt, name)(None) for name in COUNTS] == [INVALID] * 4


@pytest.mark.parametrize(
    ("visible", "count"), [("0-3", 4), ("4,5", 2), ("0,2-3,31", 4), ("7", 1), ("0-31", 32)]
)
def test_visible_cores_are_a_list_or_a_range(load, monkeypatch, visible, count):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    nrt = load()
    assert nrt.count("nrt_get_visible_vnc_count") == count
    nrt.open()
    assert nrt.count("nrt_get_visible_vnc_count") == count
    nrt.allocated(64, vnc=count - 1)
    handle = plain.c_void_p()
    for vnc in (count, -1):
        assert nrt.nrt_tensor_allocate(plain.DEVICE, vnc, 64, b"", byref(handle)) == INVALID


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("NEURON_RT_VISIBLE_CORES", value)
            for value in ("32", "0-32", "3-2", "1,0", "1,1", "0-2,2", "a", "0-", "0,", "-1", "0;1")
        ),
        *(("NEURON_RT_NUM_CORES", value) for value in ("0", "33", "two", "-1", "2x")),
        ("NEURON_LOGICAL_NC_CONFIG", "2"),  # trn1 has none
        ("NRT_SIM_INSTANCE", "p5.48xlarge"),
        ("NRT_SIM_HBM_BYTES", "much"),
        ("NRT_SIM_HOST", "../elsewhere"),
    ],
)
def test_a_wrong_environment_is_refused_with_its_reason(load, monkeypatch, capfd, name, value):
    monkeypatch.setenv(name, value)
    nrt = load()
    assert nrt.nrt_init(NO_FRAMEWORK, b"", b"") == INVALID
    assert value in capfd.readouterr().err
    monkeypatch.delenv(name)
    nrt.open()


def test_a_core_has_one_owner(load, monkeypatch, capfd):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
    first = load()
    first.open()
    for cores in ("3", "0-3", "2-5"):
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
        assert load().nrt_init(NO_FRAMEWORK, b"", b"") == NC_BUSY
    assert f"belongs to process {os.getpid()}" in capfd.readouterr().err
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-5")
    load().open()  # the failed 2-5 kept none of them
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
    second = load()
    monkeypatch.setenv("NRT_SIM_HOST", "127.0.0.2")
    second.open()  # another host's cores
    second.nrt_close()
    monkeypatch.delenv("NRT_SIM_HOST")
    first.nrt_close()
    second.open()


def test_a_number_of_cores_takes_the_first_free_ones(load, monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "1,4")
    load().open()
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("NRT_SIM_INSTANCE", "trn1.32xlarge")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    nrt = load()
    nrt.open()  # 5-7: 2-3 are too few
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "2-3")
    load().open()
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "7")
    assert load().nrt_init(NO_FRAMEWORK, b"", b"") == NC_BUSY
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "8-31")
    load().open()
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    assert load().nrt_init(NO_FRAMEWORK, b"", b"") == NC_BUSY  # only core 0 is free


def test_cores_come_back_from_a_killed_process(load, monkeypatch, tmp_path):
    nrt = load()
    script = (
        "import sys\nfrom nrt_sim.plain import PlainNrt\n"
        "nrt = PlainNrt(sys.argv[1])\nnrt.open()\nprint('open', flush=True)\nsys.stdin.read()"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(plain.__file__).parents[1]))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "9")
    command = [sys.executable, "-c", script, str(tmp_path / "libnrt_0.so")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "open\n"
        assert nrt.nrt_init(NO_FRAMEWORK, b"", b"") == NC_BUSY
        other.send_signal(signal.SIGKILL)
    nrt.open()


def bdf_of(nrt, va, room=32):
    buffer, length = create_string_buffer(max(room, 1)), c_size_t(room)
    status = nrt.nrt_get_attached_efa_bdf(va, buffer, byref(length))
    return status, buffer.value, length.value


def test_an_address_knows_its_efa_device(load, monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "1,2,4-5")
    nrt = load()
    nrt.open()
    vas = [nrt.nrt_tensor_get_va(nrt.allocated(8192, vnc)) for vnc in range(4)]
    found = [bdf_of(nrt, va)[1] for va in vas]
    # Devices 0, 1, 2, 2: pairs of devices share an adapter on this instance.
    assert found == [b"0000:10:1a.0", b"0000:10:1a.0", b"0000:a0:1a.0", b"0000:a0:1a.0"]
    assert bdf_of(nrt, vas[0] + 8191)[::2] == (SUCCESS, 12)
    assert bdf_of(nrt, vas[0], room=13)[0] == SUCCESS
    assert bdf_of(nrt, vas[0], room=12)[0] == RESOURCE
    assert bdf_of(nrt, vas[0] + 8192)[0] == FAILURE  # beyond the tensor
    assert bdf_of(nrt, 4096)[0] == FAILURE
    host = nrt.allocated(64, placement=plain.HOST)
    assert bdf_of(nrt, nrt.nrt_tensor_get_va(host))[0] == FAILURE


@pytest.mark.parametrize("instance", ["trn1.2xlarge", "inf2.48xlarge"])
def test_an_instance_without_efa_has_no_device_to_name(load, monkeypatch, instance):
    monkeypatch.setenv("NRT_SIM_INSTANCE", instance)
    nrt = load()
    nrt.open()
    assert bdf_of(nrt, nrt.nrt_tensor_get_va(nrt.allocated(64)))[0] == FAILURE


def test_the_older_runtime_cannot_name_one(load):
    assert not hasattr(load(2), "nrt_get_attached_efa_bdf")


def test_devices_and_memory_are_counted(load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_HBM_BYTES", str(3 * 4096))
    nrt = load()
    nrt.open()
    number, ids = c_uint32(), (c_uint32 * 16)()
    assert nrt.nrt_host_device_id_get(15, byref(number)) == SUCCESS
    assert number.value == 15
    assert nrt.nrt_host_device_id_get(16, byref(number)) == INVALID
    assert nrt.nrt_host_device_id_get(-1, byref(number)) == INVALID
    assert nrt.nrt_host_device_id_rid_map_get(byref(number), ids) == SUCCESS
    assert (number.value, list(ids)) == (16, list(range(16)))
    first = nrt.allocated(4097, vnc=1)
    stats, size = MemoryStats(), c_size_t()
    ask = nrt.nrt_get_vnc_memory_stats
    assert ask(1, byref(stats), sizeof(stats), byref(size)) == SUCCESS
    assert (stats.bytes_used, stats.bytes_limit, size.value) == (8192, 12288, 16)
    assert ask(2, byref(stats), sizeof(stats), byref(size)) == INVALID
    assert ask(0, byref(stats), sizeof(stats) - 1, byref(size)) == INVALID
    handle = plain.c_void_p()
    assert nrt.nrt_tensor_allocate(plain.DEVICE, 1, 4097, b"", byref(handle)) == RESOURCE
    nrt.allocated(4096, vnc=1)
    nrt.allocated(12288, vnc=0)  # a core's memory is its own
    nrt.nrt_tensor_free(byref(first))
    assert ask(1, byref(stats), sizeof(stats), byref(size)) == SUCCESS
    assert stats.bytes_used == 4096
    nrt.allocated(8192, vnc=1)  # the freed pages, joined
    address = plain.c_void_p()
    assert nrt.nrt_get_hbm_mmap_va(0, 0, byref(address), byref(size)) == INVALID
    assert address.value is None
