"""The table of libnrt's functions and structs, against lists written by hand from the headers."""

import ctypes
import shutil
import subprocess

import pytest
from nrt_sim.build import library_path

from neuron_di_bindings.nrt import FUNCTIONS, structs
from neuron_di_bindings.nrt.functions import Answer, of_generation

# Arguments of each function, counted in the published headers. What returns no status is marked.
OF_BOTH = """
nrt_init 3 | nrt_close 0 nothing | nrt_get_version 2 | nrt_get_status_as_str 1 text
nrt_get_instance_info 2 | nrt_get_total_vnc_count 1 | nrt_get_visible_vnc_count 1
nrt_get_total_nc_count 1 | nrt_get_visible_nc_count 1
nrt_host_device_id_get 2 | nrt_host_device_id_rid_map_get 2 | nrt_get_vnc_memory_stats 4
nrt_tensor_allocate 5 | nrt_tensor_free 1 nothing | nrt_tensor_read 4 | nrt_tensor_write 4
nrt_tensor_read_batch 3 | nrt_tensor_write_batch 3 | nrt_tensor_copy 5 | nrt_tensor_memset 4
nrt_tensor_get_size 1 number | nrt_tensor_allocate_empty 2 | nrt_tensor_attach_buffer 3
nrt_tensor_allocate_slice 5 | nrt_tensor_get_va 1 address
nrt_tensor_get_device_allocation_info 2 | nrt_tensor_check_output_completion 3
nrt_tensor_reset_output_completion 1 | nrt_get_dmabuf_fd 3 | nrt_get_hbm_mmap_va 4
nrt_get_attached_efa_bdf 3 | nrt_get_dmabuf_fd_v2 4
nrt_load 5 | nrt_load_collectives 7 | nrt_unload 1 | nrt_get_model_vnc_count 2
nrt_allocate_tensor_set 1 | nrt_destroy_tensor_set 1 nothing | nrt_add_tensor_to_tensor_set 3
nrt_get_tensor_from_tensor_set 3 | nrt_execute 3 | nrt_execute_repeat 4
nrt_build_global_comm 3 | nrt_cc_global_comm_init 3 | nrt_get_model_tensor_info 2
nrt_free_model_tensor_info 1 | nrt_memcpy_to_device 3 | nrt_barrier 3
nrt_get_libnccl_net 3 address
nrt_async_sendrecv_get_max_num_communicators_per_lnc 1
nrt_async_sendrecv_get_max_num_pending_request 1 | nrt_async_sendrecv_init 1
nrt_async_sendrecv_close 1 | nrt_async_sendrecv_connect 4 | nrt_async_sendrecv_accept 4
nrt_async_sendrecv_test_comm 2 | nrt_async_sendrecv_send_tensor 5
nrt_async_sendrecv_recv_tensor 5 | nrt_async_sendrecv_test_request 3 | nrt_async_sendrecv_flush 1
nrta_cc_prepare 7 | nrta_is_completed 2 | nrta_get_sequence 4
"""
OF_2 = """
nrta_tensor_write 7 | nrta_tensor_read 7 | nrta_tensor_copy 8 | nrta_execute_schedule 6
nrta_cc_schedule 4 | nrta_get_completion_handle 2 | nrta_error_tracker_create 2
nrta_error_tracker_destroy 1 nothing | nrta_error_tracker_get_list 3
"""
OF_3 = """
nrta_tensor_write 8 | nrta_tensor_read 8 | nrta_tensor_copy 9 | nrta_execute_schedule 6
nrta_cc_schedule 4 | nrta_event_register_seq_id_completion 2
nrta_event_register_xu_completion 4
"""
# Kinds of arguments in C, in order, where a mix-up would pass unseen.
KINDS = {
    "nrt_tensor_read": "pointer pointer size_t size_t",
    "nrt_tensor_memset": "pointer uint64 int size_t",
    "nrt_tensor_copy": "pointer size_t pointer size_t size_t",
    "nrt_tensor_allocate": "int int size_t text pointer",
    "nrt_tensor_check_output_completion": "pointer int64 uint64",
    "nrt_get_dmabuf_fd": "uint64 uint64 pointer",
    "nrt_load_collectives": "pointer size_t int int uint32 uint32 pointer",
    "nrt_get_vnc_memory_stats": "uint32 pointer size_t pointer",
    "nrt_tensor_read_batch": "pointer uint64 bool",
    "nrt_async_sendrecv_connect": "text int int pointer",
    "nrt_async_sendrecv_send_tensor": "pointer size_t size_t pointer pointer",
    "nrt_cc_global_comm_init": "uint32 uint32 uint32",
    "nrt_build_global_comm": "int uint32 uint32",
    "nrta_get_sequence": "uint32 int int pointer",
    "nrta_is_completed": "uint64 pointer",
}
ABSENT_IN_SIMULATOR = {
    2: {"nrt_get_dmabuf_fd_v2", "nrt_get_attached_efa_bdf"},  # as in SDK 2.28
    3: {"nrt_get_dmabuf_fd_v2"},
}


def written_by_hand(*texts):
    rows = {}
    for row in " | ".join(" | ".join(text.split("\n")) for text in texts).split("|"):
        if words := row.split():
            name, count, *answer = words
            assert name not in rows
            rows[name] = (int(count), answer[0] if answer else "status")
    return rows


@pytest.mark.parametrize(("generation", "texts"), [(2, (OF_BOTH, OF_2)), (3, (OF_BOTH, OF_3))])
def test_the_table_has_the_published_functions(generation, texts):
    table = of_generation(generation)
    found = {name: (len(row.arguments), row.answer.name.lower()) for name, row in table.items()}
    assert found == written_by_hand(*texts)


def test_without_a_generation_there_are_no_asynchronous_functions():
    names = set(written_by_hand(OF_BOTH))
    assert set(of_generation(None)) == {name for name in names if not name.startswith("nrta_")}


def test_no_row_is_there_twice_and_each_says_what_it_is_and_whence():
    keys = [(row.name, row.generation) for row in FUNCTIONS]
    assert len(keys) == len(set(keys)) > 75
    headers = {"nrt.h", "nrt_async.h", "nrt_async_sendrecv.h", "nrt_experimental.h"}
    headers |= {"nrt_version.h", "nrt_status.h", "libfabric, hmem_neuron.c"}
    assert {row.source for row in FUNCTIONS} == headers
    assert all(row.summary.endswith(".") for row in FUNCTIONS)
    assert all(row.source.startswith("nrt_async.h") for row in FUNCTIONS if row.generation)


def kind_of(argument):
    if argument is ctypes.c_void_p or hasattr(argument, "contents"):
        return "pointer"
    sizes = {ctypes.c_int: "int", ctypes.c_uint32: "uint32", ctypes.c_int64: "int64"}
    others = {ctypes.c_bool: "bool", ctypes.c_char_p: "text", ctypes.c_size_t: "64 bits"}
    return (sizes | others)[argument]


@pytest.mark.parametrize("name", KINDS)
def test_arguments_are_of_the_right_kind(name):
    expected = KINDS[name].replace("size_t", "64 bits").replace("uint64", "64 bits")
    row = of_generation(3)[name]
    assert " ".join(kind_of(argument) for argument in row.arguments) == expected


def test_the_generations_differ_in_the_core_and_in_where_the_result_goes():
    before, after = of_generation(2), of_generation(3)
    for name in ("nrta_tensor_write", "nrta_tensor_read", "nrta_tensor_copy"):
        assert [kind_of(each) for each in before[name].arguments[-3:]] == ["int", *["pointer"] * 2]
        kinds = [kind_of(each) for each in after[name].arguments[-4:]]
        assert kinds == ["int", "int", "pointer", "pointer"]
    for row in (before["nrta_execute_schedule"], after["nrta_execute_schedule"]):
        assert [kind_of(each) for each in row.arguments[-3:]] == ["int", "pointer", "pointer"]
    assert before["nrta_execute_schedule"].arguments[-2] is ctypes.c_void_p  # a tracker
    assert after["nrta_execute_schedule"].arguments[-2] is ctypes.POINTER(ctypes.c_int)


def test_answers_are_what_c_returns():
    kinds = {row.answer for row in FUNCTIONS}
    assert kinds == set(Answer)
    assert ctypes.sizeof(Answer.STATUS.value) == 4  # an enum


def exported(api):
    """Names and versions of a library's symbols, by the loader's table."""
    done = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--with-symbol-versions", str(library_path(api))],
        capture_output=True,
        text=True,
        check=True,
    )
    words = (
        line.split()[-1].replace("@@", "@").partition("@") for line in done.stdout.splitlines()
    )
    return {name: version for name, _, version in words if name.startswith(("nrt_", "nrta_"))}


@pytest.mark.parametrize("api", [2, 3])
def test_the_simulator_has_the_functions_of_the_table_and_no_others(api):
    found = {name: version for name, version in exported(api).items() if "sim" not in name}
    assert set(found) == set(of_generation(api)) - ABSENT_IN_SIMULATOR[api]
    versions = {name: "NRT_3.0.0" if name.startswith("nrta_") else "NRT_2.0.0" for name in found}
    assert api == 2 or found == versions


# Offsets and sizes in bytes, reckoned by hand on a 64-bit host.
LAYOUTS = {
    structs.NrtVersionStruct: (
        224,
        "nrt_version_t",
        {"rt_major": 0, "rt_minor": 8, "rt_patch": 16, "rt_maintenance": 24}
        | {"rt_detail": 32, "git_hash": 160},
    ),
    structs.InstanceInfoStruct: (
        32,
        "nrt_instance_info_t",
        {"family": 0, "size": 4, "arch_name": 8, "device_revision": 24},
    ),
    structs.MemoryStatsStruct: (16, "nrt_vnc_memory_stats_t", {"bytes_used": 0, "bytes_limit": 8}),
    structs.BatchOperationStruct: (
        24,
        "nrt_tensor_batch_op_t",
        {"offset": 0, "size": 8, "buffer": 16},
    ),
    structs.BatchStruct: (24, "nrt_tensor_batch_t", {"tensor": 0, "ops": 8, "num_ops": 16}),
    structs.AllocationInfoStruct: (
        24,
        "nrt_tensor_device_allocation_info_t",
        {"physical_address": 0, "size": 8, "hbm_index": 16},
    ),
    structs.TensorInfoStruct: (
        296,
        "nrt_tensor_info_t",
        {"name": 0, "usage": 256, "size": 264, "dtype": 272, "shape": 280, "ndim": 288},
    ),
    structs.TensorInfoArrayStruct: (
        8,
        "nrt_tensor_info_array_t",
        {"tensor_count": 0, "tensor_array": 8},
    ),
    structs.AsyncErrorStruct: (16, "nrta_error_t", {"seq_id": 0, "error_code": 8}),
    structs.CollectiveGroupStruct: (
        32,
        "nrt_cc_comm_t",
        {"replica_group": 0, "rank": 8, "rank_n": 12, "ctx_device_id": 16}
        | {"ctx_device_count": 20, "vnc": 24},
    ),
    structs.TensorListStruct: (16, "nrt_tensor_list_t", {"tensors": 0, "num_tensors": 8}),
}
DECLARATIONS = """
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
typedef struct { uint64_t rt_major, rt_minor, rt_patch, rt_maintenance;
                 char rt_detail[128], git_hash[64]; } nrt_version_t;
typedef struct { uint32_t family, size; char arch_name[16], device_revision[8]; }
    nrt_instance_info_t;
typedef struct { size_t bytes_used, bytes_limit; } nrt_vnc_memory_stats_t;
typedef struct { uint64_t offset, size; void *buffer; } nrt_tensor_batch_op_t;
typedef struct { const void *tensor; const nrt_tensor_batch_op_t *ops; uint32_t num_ops; }
    nrt_tensor_batch_t;
typedef struct { uint64_t physical_address; size_t size; int hbm_index; }
    nrt_tensor_device_allocation_info_t;
typedef enum { IN, OUT } usage_t;
typedef enum { TYPE_A, TYPE_B = 15 } dtype_t;
typedef struct { char name[256]; usage_t usage; size_t size; dtype_t dtype; uint32_t *shape;
                 uint32_t ndim; } nrt_tensor_info_t;
typedef struct { uint64_t tensor_count; nrt_tensor_info_t tensor_array[]; }
    nrt_tensor_info_array_t;
typedef struct { uint64_t seq_id, error_code; } nrta_error_t;
typedef struct { uint32_t *replica_group; uint32_t rank, rank_n, ctx_device_id, ctx_device_count,
                 vnc; } nrt_cc_comm_t;
typedef struct { void **tensors; size_t num_tensors; } nrt_tensor_list_t;
"""


def test_every_struct_is_held_against_numbers():
    classes = [each for each in vars(structs).values() if isinstance(each, type)]
    assert {each for each in classes if issubclass(each, ctypes.Structure)} == set(LAYOUTS)


@pytest.mark.parametrize("struct", LAYOUTS, ids=lambda struct: struct.__name__)
def test_a_struct_is_laid_out_as_reckoned(struct):
    size, _, offsets = LAYOUTS[struct]
    assert ctypes.sizeof(struct) == size
    assert {name: getattr(struct, name).offset for name, _ in struct._fields_} == offsets


def test_a_compiler_lays_the_structs_out_the_same(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None
    prints = []
    for _, name, offsets in LAYOUTS.values():
        prints.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for key in offsets:
            prints.append(f'printf("{name}.{key} %zu\\n", offsetof({name}, {key}));')
            if key != "tensor_array":  # of any length
                prints.append(f'printf("{name}.{key}+ %zu\\n", sizeof((({name} *)0)->{key}));')
    source = tmp_path / "layout.c"
    source.write_text(f"{DECLARATIONS}int main(void) {{ {' '.join(prints)} }}\n")
    program = str(tmp_path / "layout")
    subprocess.run([compiler, "-Wall", "-Werror", "-o", program, str(source)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    expected = {}
    for struct, (size, name, offsets) in LAYOUTS.items():
        expected |= {name: size} | {f"{name}.{key}": offset for key, offset in offsets.items()}
        sizes = {key: getattr(struct, key).size for key in offsets if key != "tensor_array"}
        expected |= {f"{name}.{key}+": count for key, count in sizes.items()}
    found = {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}
    assert found == expected
