"""Whether the bindings' structs and statuses are those of the headers that are installed here.

A C compiler measures the headers of aws-neuronx-runtime-lib; ctypes measures ours. Needs both a
compiler and the headers, and no device.
"""

import ctypes
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neuron_di.doctor.machine import Machine
from neuron_di_bindings.nrt import NrtStatus, structs

INCLUDE_FOLDER = "/opt/aws/neuron/include"
_HEADERS = (
    *("nrt/nrt.h", "nrt/nrt_version.h", "nrt/nrt_status.h", "nrt/nrt_experimental.h"),
    *("nrt/nrt_async.h", "nrt/nrt_async_sendrecv.h"),
)
_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "nrt_version_t": structs.NrtVersionStruct,
    "nrt_instance_info_t": structs.InstanceInfoStruct,
    "nrt_vnc_memory_stats_t": structs.MemoryStatsStruct,
    "nrt_tensor_batch_op_t": structs.BatchOperationStruct,
    "nrt_tensor_batch_t": structs.BatchStruct,
    "nrt_tensor_device_allocation_info_t": structs.AllocationInfoStruct,
    "nrt_tensor_info_t": structs.TensorInfoStruct,
    "nrt_tensor_info_array_t": structs.TensorInfoArrayStruct,
    "nrt_tensor_list_t": structs.TensorListStruct,
    "nrt_cc_comm_t": structs.CollectiveGroupStruct,
}
_COMPILE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """By C name: what differs, in words; the rest agrees. `unknown` could not be measured: the
    headers have it under another name, or not at all."""

    same: tuple[str, ...]
    differing: dict[str, str]
    unknown: tuple[str, ...]


def compare(machine: Machine) -> Layouts | str:
    """Or why it cannot be done here."""
    folder = Path(machine.root, INCLUDE_FOLDER.lstrip("/"))
    headers = [header for header in _HEADERS if (folder / header).is_file()]
    if not headers:
        return f"there are no headers in {INCLUDE_FOLDER}"
    compiler = next((name for name in ("cc", "gcc") if machine.program(name)), None)
    if compiler is None:
        return "there is no C compiler"
    includes = "".join(f"#include <{header}>\n" for header in headers)
    same: list[str] = []
    differing: dict[str, str] = {}
    unknown: list[str] = []
    with tempfile.TemporaryDirectory() as place:

        def measure(asked: Mapping[str, int]) -> list[int] | None:
            return _measure(machine, compiler, folder, Path(place), includes, [*asked])

        statuses = {f"NRT_{status.name}": int(status) for status in NrtStatus}
        questions = _structs() | {name: {name: value} for name, value in statuses.items()}
        if measure(statuses) == list(statuses.values()):  # else one by one, to see which
            same += statuses
            questions = _structs()
        for name, ours in questions.items():
            found = measure(ours)
            if found is None:
                unknown.append(name)
            elif words := _difference(ours, found):
                differing[name] = words
            else:
                same.append(name)
    return Layouts(same=tuple(same), differing=differing, unknown=tuple(unknown))


def _structs() -> dict[str, dict[str, int]]:
    """By C name: expressions, and what we take them to be."""
    asked: dict[str, dict[str, int]] = {}
    for name, ours in _STRUCTS.items():
        asked[name] = {f"sizeof({name})": ctypes.sizeof(ours)}
        for field, *_ in ours._fields_:
            asked[name][f"offsetof({name}, {field})"] = getattr(ours, str(field)).offset
    return asked


def _measure(
    machine: Machine, compiler: str, folder: Path, place: Path, includes: str, asked: list[str]
) -> list[int] | None:
    """What the headers make of these expressions; None where they do not know one of them."""
    prints = "".join(f'printf("%lld\\n", (long long)({one}));' for one in asked)
    source, program = place / "layout.c", place / "layout"
    source.write_text(
        "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n"
        f"{includes}int main(void) {{ {prints} return 0; }}\n"
    )
    words = (compiler, "-w", "-I", str(folder), "-o", str(program), str(source))
    made = machine.run(*words, timeout_s=_COMPILE_TIMEOUT_S)
    if made is None or made.returncode != 0:
        return None
    ran = machine.run(str(program), timeout_s=_COMPILE_TIMEOUT_S)
    if ran is None or ran.returncode != 0:
        return None
    return [int(line) for line in ran.stdout.split()]


def _difference(ours: Mapping[str, int], theirs: list[int]) -> str:
    pairs = zip(ours.items(), theirs, strict=True)
    return "; ".join(
        f"{what} is {number}, and {wanted} in ours"
        for (what, wanted), number in pairs
        if number != wanted
    )
