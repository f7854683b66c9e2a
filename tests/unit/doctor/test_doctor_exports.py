"""What a library exports, and whether headers agree with the bindings: against real tools."""

import shutil
import subprocess
from pathlib import Path

import pytest
from neuron_machines import laptop
from nrt_sim.build import FOLDER, compiler, library_path

from neuron_di.doctor import nrt_layout
from neuron_di.doctor.elf_exports import NoElf, exported_functions
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.nrt_layout import Layouts, compare


@pytest.mark.parametrize("api", [2, 3])
def test_the_exports_of_the_simulator(api):
    exports = exported_functions(library_path(api))
    assert exports["nrt_init"] == "NRT_2.0.0"
    assert exports["nrta_is_completed"] == f"NRT_{api}.0.0"
    assert ("nrt_get_attached_efa_bdf" in exports) == (api == 3)
    script = (FOLDER / f"exports_api{api}.map").read_text()
    assert {label for label in exports.values() if not label.startswith("NRT_SIM")} <= {
        word for word in script.split() if word.startswith("NRT_")
    }


def test_they_are_those_of_nm(tmp_path):
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    source, library = tmp_path / "x.c", tmp_path / "x.so"
    source.write_text("int a; static int b(void) { return 1; } int c(void) { return b(); }\n")
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    for path in (library, library_path()):
        done = subprocess.run(
            ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
        )
        rows = [line.split() for line in done.stdout.splitlines()]
        wanted = {row[2].partition("@")[0] for row in rows if row[1] == "T"}
        assert set(exported_functions(path)) == wanted
    assert exported_functions(library) == {"c": ""}


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 200, b"#!/bin/sh\n"]
)
def test_what_is_no_library(tmp_path, content):
    path = tmp_path / "libnrt.so.1"
    path.write_bytes(content)
    with pytest.raises(NoElf, match=r"libnrt\.so\.1"):
        exported_functions(path)


def test_a_library_that_was_cut_off(tmp_path):
    path = tmp_path / "libnrt.so.1"
    whole = library_path().read_bytes()
    for share in (0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(NoElf):
            exported_functions(path)


@pytest.fixture
def headers(tmp_path) -> Path:
    """The simulator's own declarations, where AWS's headers would be."""
    folder = tmp_path / "root/opt/aws/neuron/include/nrt"
    folder.mkdir(parents=True)
    shutil.copyfile(FOLDER / "nrt_types.h", folder / "nrt.h")
    return folder


def test_the_bindings_structs_are_those_of_the_headers(tmp_path, headers):
    found = compare(Machine(root=tmp_path / "root"))
    assert isinstance(found, Layouts)
    assert found.differing == {}
    assert found.unknown == ()
    assert {"nrt_version_t", "nrt_tensor_info_t", "NRT_TIMEOUT"} <= set(found.same)


def test_headers_that_differ_are_told_field_by_field(tmp_path, headers):
    text = (headers / "nrt.h").read_text()
    text = text.replace("char git_hash[64];", "char git_hash[65];")
    text = text.replace("uint64_t rt_major", "uint32_t rt_major")
    text = text.replace("NRT_TIMEOUT = 5", "NRT_TIMEOUT = 6").replace("NRT_HW_ERROR = 6,", "")
    (headers / "nrt.h").write_text(text)
    found = compare(Machine(root=tmp_path / "root"))
    assert isinstance(found, Layouts)
    assert found.unknown == ("NRT_HW_ERROR",)
    assert "sizeof(nrt_version_t) is" in found.differing["nrt_version_t"]
    assert found.differing["NRT_TIMEOUT"] == "NRT_TIMEOUT is 6, and 5 in ours"
    assert "nrt_tensor_info_t" in found.same


def test_without_headers_or_a_compiler_it_says_so(tmp_path, headers):
    assert compare(Machine(root=laptop(tmp_path / "other").folder)) == (
        "there are no headers in /opt/aws/neuron/include"
    )
    bare = Machine(root=tmp_path / "root", environment={"PATH": "/nowhere"})
    assert compare(bare) == "there is no C compiler"
    assert nrt_layout.INCLUDE_FOLDER.startswith("/opt/aws")
