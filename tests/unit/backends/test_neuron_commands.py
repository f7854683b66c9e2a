"""`neuron-di compile`, and what `neuron-di worker` says when it cannot have its device: code 2."""

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neuron_backend_kit import compiled, engine_options, simulated

from neuron_di import compile_command
from neuron_di.backends import neuron_compile
from neuron_di.cli import main

SHAPE = ("--tp=2", "--context-tokens=256", "--decode-batch=4", "--dtype=float32")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    simulated(tmp_path / "root", monkeypatch)
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])  # a command sets it for its process, which is this one
    root.handlers[:] = before[1]


@pytest.fixture
def run(llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`neuron-di COMMAND MODEL` with a shape and these flags: code, output, errors."""

    def run_command(command: str, *flags: str) -> tuple[int, str, str]:
        words = [command, str(llama_folder), f"--neuron-artifacts={tmp_path / 'artifacts'}"]
        code = main([*words, *SHAPE, *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run_command


def shut_down() -> None:
    from stand_in import cores

    cores.shut_down()


def worker(run: Run, *flags: str) -> str:
    """What a worker says that cannot start."""
    code, out, err = run("worker", "--role=decode", "--device=neuron", "--log-level=error", *flags)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("neuron-di: ")
    return line


def test_compile_says_where_and_the_second_time_that_it_was_there(run: Run, tmp_path: Path) -> None:
    code, out, err = run("compile")
    assert code == 0
    folder = Path(out.strip())
    assert folder.parent == tmp_path / "artifacts"
    assert (folder / "model.pt").is_file()
    assert f": {folder.name}" in err
    assert "compiled in 0 s" in err
    assert run("compile") == (0, out, f"compiled before: {folder.name}\n")


def test_progress_is_shown_while_it_compiles(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal as lines now and then."""
    compile_model, is_told = neuron_compile.compile_model, []
    monkeypatch.setattr(compile_command, "_LINE_EVERY_S", 0.001)
    say = compile_command.Console.print

    def said(console: object, words: str) -> None:
        is_told.append(words)
        say(console, words)

    def until_told_twice() -> None:
        """The second of them was worded after now."""
        before, give_up_s = len(is_told), time.monotonic() + 60
        while sum("MiB so far" in words for words in is_told[before:]) < 2:
            assert time.monotonic() < give_up_s
            time.sleep(0.001)

    def slow(*arguments: object) -> None:
        until_told_twice()
        compile_model(*arguments)
        until_told_twice()

    monkeypatch.setattr(compile_command.Console, "print", said)
    monkeypatch.setattr(neuron_compile, "compile_model", slow)
    assert run("compile")[0] == 0
    told = [words for words in is_told if "MiB so far" in words]
    assert re.fullmatch(r"compiling: \d+ s, 0\.0 MiB so far", told[0])
    assert any(re.fullmatch(r"compiling: \d+ s, [1-9]\d*\.\d MiB so far", words) for words in told)


def test_what_others_print_meanwhile_is_no_output(
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    compile_model = neuron_compile.compile_model

    def chatty(*arguments: object) -> None:
        sys.stdout.write("a package says\n")
        subprocess.run(["echo", "a compiler says"], check=True, timeout=60)
        compile_model(*arguments)

    monkeypatch.setattr(neuron_compile, "compile_model", chatty)
    assert main(["compile", str(llama_folder), f"--neuron-artifacts={tmp_path}", *SHAPE]) == 0
    said = capfd.readouterr()
    (folder,) = said.out.splitlines()
    assert Path(folder).is_dir()
    assert "a package says" in said.err
    assert "a compiler says" in said.err


def test_what_was_compiled_serves_both_roles(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    _, out, _ = run("compile")
    made = compiled(llama_folder, engine_options(tmp_path / "artifacts", tp=2))
    assert (str(made.folder), made.is_new) == (out.strip(), False)


def test_nothing_is_compiled_for_a_cpu(run: Run) -> None:
    code, _, err = run("compile", "--device=cpu")
    assert code == 2
    assert "nothing is compiled for --device cpu" in err


def test_compile_without_the_packages(llama_folder: Path, tmp_path: Path) -> None:
    """In a process that cannot find them."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "neuron_di", "compile", str(llama_folder)],
        env=environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "neuron-di: --device neuron needs neuronx_distributed_inference and torch_neuronx: "
    )
    assert [*tmp_path.glob("neuron-di")] == [], "nothing half-made"


# A worker that cannot start.


def test_a_worker_without_an_artifact_names_the_command(run: Run, llama_folder: Path) -> None:
    words = worker(run)
    assert f"Mend: compile it: neuron-di compile {llama_folder} --tp 2 --decode-batch 4" in words
    assert run("compile")[0] == 0
    assert "slots is 4, and 5 is wanted" in worker(run, "--decode-batch=5")
    assert "tp is 2, and 4 is wanted" in worker(run, "--tp=4")


def test_a_worker_without_the_library(run: Run) -> None:
    assert run("compile")[0] == 0
    words = worker(run, "--libnrt=/nowhere/libnrt.so.1")
    assert "needs the Neuron runtime: no libnrt can be loaded (/nowhere/libnrt.so.1" in words


def test_a_worker_with_wrong_cores(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("compile")[0] == 0
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "5")
    assert "need 2 NeuronCores (this worker 2) and may use 1 (5)" in worker(run)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "junk")
    assert "NEURON_RT_VISIBLE_CORES=junk names no cores" in worker(run)


def test_a_worker_whose_cores_are_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("compile")[0] == 0
    monkeypatch.setenv("NRT_SIM_FAULTS", "function=nrt_init status=1005")
    words = worker(run)
    assert "NeuronCores 0-1 cannot be taken: another process has one of them" in words
    assert "end it, or name other cores with NEURON_RT_VISIBLE_CORES" in words


def test_a_worker_with_another_runner(run: Run) -> None:
    assert "Use --neuron-runner nxdi" in worker(run, "--neuron-runner=torch-neuronx")


def test_a_worker_whose_artifact_lacks_the_mask(run: Run) -> None:
    _, out, _ = run("compile")
    config = Path(out.strip()) / "neuron_config.json"
    text = config.read_text()
    config.write_text(text.replace('"apply_seq_ids_mask": true', '"apply_seq_ids_mask": false'))
    assert "apply_seq_ids_mask is false, and true is wanted" in worker(run)
    config.write_text(text.replace('"async_mode": false', '"async_mode": true'))
    assert "async_mode is true, and false is wanted" in worker(run)


def test_a_worker_whose_artifact_is_damaged(run: Run) -> None:
    _, out, _ = run("compile")
    folder = Path(out.strip())
    (folder / "model.pt").write_text("junk")
    words = worker(run)
    shut_down()
    assert f"NxD Inference could not load the compiled model in {folder}: " in words
    assert "Mend: should its files be damaged, delete that folder and run neuron-di comp" in words
    (folder / "model.pt").unlink()
    assert "will not do: it lacks model.pt. Mend: compile it: neuron-di compile" in worker(run)
    code, _, err = run("compile")
    assert code == 0
    assert "compiled in " in err
    assert (folder / "model.pt").is_file()


def test_a_compiled_model_that_is_named_itself_is_mended_beside_it(
    run: Run,
) -> None:
    """Compiling into it is refused."""
    folder = Path(run("compile")[1].strip())
    (folder / "model.pt").unlink()
    words = worker(run, f"--neuron-artifacts={folder}")
    end = f"--neuron-artifacts {folder.parent}, and name with --neuron-artifacts the folder that it"
    assert f"{end} prints" in words


@pytest.mark.parametrize("status", [1, 1200])
def test_a_worker_whose_device_fails_while_it_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    assert run("compile")[0] == 0
    monkeypatch.setenv("NRT_SIM_FAULTS", f"function=nrt_tensor_write status={status} sticky")
    try:
        words = worker(run)
    finally:
        ctypes.CDLL(os.environ["NEURON_DI_LIBNRT"]).nrt_sim_clear_faults()
        shut_down()
    assert "the model could not be loaded onto NeuronCores 0-1: " in words
    assert "nrt_tensor_write" in words
    assert "Mend: the kernel's log and neuron-top say" in words


def test_a_compile_that_is_told_to_end_leaves_nothing_half_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile: list[str] = []

    def ended(_settings: object, _folder: Path, out: Path) -> None:
        (out / "model.pt").touch()
        meanwhile.extend(path.name for path in (tmp_path / "artifacts").iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    def heard(*_: object) -> None:
        pytest.fail("compile did not hear the signal itself")

    monkeypatch.setattr(neuron_compile, "compile_model", ended)
    before = signal.signal(signal.SIGTERM, heard)
    try:
        with pytest.raises(SystemExit) as end:
            run("compile")
        assert signal.getsignal(signal.SIGTERM) is heard
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == 128 + signal.SIGTERM
    (left,) = (tmp_path / "artifacts").iterdir()
    assert left.name.endswith(".lock")
    assert sorted(meanwhile) == [left.name, f"{left.stem}.partial"]


def test_the_librarys_variable_is_an_option_like_any_other(run: Run) -> None:
    """It is read by the runtime bindings as well, in every process."""
    assert "NEURON_DI_LIBNRT" in os.environ
    assert run("compile")[0] == 0
