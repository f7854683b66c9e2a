"""Models and queues of the simulator of libnrt under the address sanitizer.

What a caller gives to a queue must live until the request is over: here who forgets is found.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nrt_sim import plain
from nrt_sim.build import CannotBuild, sanitized_library_path, sanitizer_runtime

SCRIPT = Path(__file__).with_name("nrt_execution_exercise.py")


def run_sanitized(name: str, folder: Path, api: int = 3) -> subprocess.CompletedProcess:
    try:
        library, runtime = sanitized_library_path(api), sanitizer_runtime()
    except CannotBuild as error:
        pytest.skip(str(error))
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(library), str(api), name],
        env={
            **os.environ,
            "LD_PRELOAD": str(runtime),
            # Leaks are Python's own business; its small blocks come from malloc to be watched.
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": str(Path(plain.__file__).parents[1]),
            "NRT_SIM_ROOT": str(folder),
            "NRT_SIM_HBM_BYTES": "8000000",
            "NEURON_RT_NUM_CORES": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.mark.timeout(300)  # sanitized, on a machine that may be busy
@pytest.mark.parametrize("api", [2, 3])
def test_no_byte_is_touched_that_there_is_not(tmp_path, api):
    done = run_sanitized("everything", tmp_path, api)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]


def test_a_freed_tensor_stays_until_its_request_is_over(tmp_path):
    done = run_sanitized("forgotten_tensor", tmp_path)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]


@pytest.mark.parametrize("name", ["forgotten_buffer", "forgotten_status_slot"])
def test_memory_that_is_gone_before_its_request_is_over_is_found(tmp_path, name):
    done = run_sanitized(name, tmp_path)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-use-after-free" in done.stderr
    assert "whole" not in done.stdout
