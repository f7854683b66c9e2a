"""The check itself, run without a GPU: the CPU backend stands for the device."""

import json
import os
import subprocess
import sys
import textwrap
import time
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.device_check import run_part as part_process
from benchmarks.device_check.__main__ import hide_paths, main, run_part
from benchmarks.device_check.budget import RESERVE_S, Budget, Times
from benchmarks.device_check.child import MARK, run_with_deadline
from benchmarks.device_check.companion import Companion
from benchmarks.device_check.decode_plot import plot_decode
from benchmarks.device_check.device_model import prefill_flops, step_bytes
from benchmarks.device_check.models import SHAPES, checkpoint
from benchmarks.device_check.origin import tree_digest
from benchmarks.device_check.part_equality import Difference
from benchmarks.device_check.parts import BY_NAME, Part
from benchmarks.device_check.record import Record, Skip
from benchmarks.device_check.report import Report
from benchmarks.device_check.result import Origin, PartResult
from benchmarks.device_check.settings import ROOT, Settings
from benchmarks.device_check.surroundings import CannotRun, environment, unpacked_wheels
from benchmarks.device_check.tests_run import run_tests

torch = pytest.importorskip("torch")
ModelSpec = pytest.importorskip("neuron_di.models").ModelSpec
ModelWeights = pytest.importorskip("neuron_di.models").ModelWeights

# Starts a process in a session of its own, says its id, and then waits for longer than it may.
LEAVES_SOMEBODY = """
import subprocess, sys, time
sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(sleeper.pid, flush=True)
if sys.argv[1] == "stay":
    time.sleep(300)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(300)
"""


def child(tmp_path, script, *words, deadline_s=60.0, grace_s=10.0):
    return run_with_deadline(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        environ=dict(os.environ),
        log=tmp_path / "log",
        deadline_s=deadline_s,
        grace_s=grace_s,
    )


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def record_at(tmp_path, name="kernels"):
    origin = Origin("", "", "", is_rehearsal=True)
    result = PartResult(name=name, origin=origin, started_unix_s=0.0)
    return Record(result, tmp_path / "result.json")


def test_a_child_that_ends_gives_its_code_and_its_words(tmp_path):
    ended = child(tmp_path, "import sys; print('said'); sys.exit(3)")
    assert (ended.code, ended.num_left) == (3, 0)
    assert (tmp_path / "log").read_text() == "said\n"


@pytest.mark.parametrize(("how", "code"), [("go", 0), ("stay", None)])
def test_nobody_is_left_behind(tmp_path, how, code):
    ended = child(tmp_path, LEAVES_SOMEBODY, how, deadline_s=60 if how == "go" else 3)
    assert ended.code == code
    assert ended.num_left >= 1
    assert not is_alive(int((tmp_path / "log").read_text()))


def test_a_child_that_ignores_its_deadline_is_killed(tmp_path):
    ended = child(tmp_path, STUBBORN, deadline_s=2, grace_s=0.2)
    assert ended.code is None
    assert (tmp_path / "log").read_text() == "begun\n"


def test_the_mark_is_no_option_of_the_product():
    """A process of ours refuses a variable of its own prefix that it does not know."""
    assert not MARK.startswith("NEURON_DI")


def write_tests(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    return folder


def test_tests_that_fail_are_told_by_name_and_words(tmp_path):
    write_tests(
        tmp_path / "them",
        good="def test_good(): pass",
        bad="""
            import pytest
            def test_bad(): assert 1 == 2, "one is not two"
            def test_other(): pytest.skip("no GPU here")
        """,
    )
    record = record_at(tmp_path)
    with pytest.raises(RuntimeError, match="1 of 3 tests failed"):
        run_tests(record, ["them"], num_processes=2, root=tmp_path)
    failures, skipped = record.result.tables
    assert failures.rows[0][0] == "test_bad::test_bad"
    assert "one is not two" in failures.rows[0][1]
    assert skipped.rows == [["no GPU here", "1"]]
    assert record.result.notes == ["1 passed, 1 failed, 1 skipped."]


def test_tests_that_cannot_be_collected_are_no_pass(tmp_path):
    write_tests(tmp_path / "them", broken="import nothing_of_this_name", good="def test_a(): pass")
    with pytest.raises(RuntimeError):
        run_tests(record_at(tmp_path), ["them"], root=tmp_path)


def test_tests_that_were_all_skipped_are_no_pass(tmp_path):
    write_tests(
        tmp_path / "them",
        none="import pytest\npytestmark = pytest.mark.skip('no GPU')\ndef test_a(): pass",
    )
    with pytest.raises(Skip, match="no GPU"):
        run_tests(record_at(tmp_path), ["them"], root=tmp_path)
    with pytest.raises(Skip, match="there is no elsewhere"):
        run_tests(record_at(tmp_path), ["elsewhere"], root=tmp_path)


def test_bytes_of_a_step_are_those_of_the_weights_and_the_kv(tmp_path):
    spec = ModelSpec.from_folder(checkpoint("toy", tmp_path))
    with torch.device("meta"):
        weights = ModelWeights.allocate(spec, torch.bfloat16)
    held = sum(tensor.nbytes for _, tensor in weights.stored_tensors(spec))
    read = held - (0 if spec.has_tied_embeddings else weights.embedding.nbytes)
    assert step_bytes(spec, [], 2) == read
    layout = spec.kv_layout(block_size=1, dtype="bfloat16")
    assert step_bytes(spec, [5, 7], 2) == read + 12 * layout.block_bytes
    matrices = [t for name, t in weights.stored_tensors(spec) if t.dim() == 2 and "layers" in name]
    one = 2 * sum(t.numel() for t in matrices) + 2 * spec.num_vocab * spec.hidden
    one += 4 * spec.num_layers * spec.num_heads * spec.head_dim  # a position sees itself
    assert prefill_flops(spec, 1) == one


@pytest.mark.parametrize(
    ("shape", "millions", "weights_gb"), [("1b", 1236, 2.5), ("8b", 8030, 16.1)]
)
def test_the_shapes_are_those_of_the_models_that_they_are_named_for(shape, millions, weights_gb):
    config = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    config |= {"torch_dtype": "bfloat16", **SHAPES[shape]}
    spec = ModelSpec.from_config(config, eos_token_id=2, source="here")
    assert round(spec.num_parameters() / 1e6) == millions
    assert spec.weight_bytes("bfloat16") / 1e9 == pytest.approx(weights_gb, abs=0.05)


def test_a_difference_counts_tokens_prompts_and_what_was_lost():
    found = Difference()
    found.add(0, torch.tensor([1.0, 4.0, 3.0]), torch.tensor([1.0, 4.0, 3.0]))
    found.add(1, torch.tensor([1.0, 4.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))
    found.add(1, torch.tensor([0.0, 0.0, 9.0]), torch.tensor([0.0, 0.0, 9.0]))
    assert (found.num_tokens, found.num_differing, found.prompts) == (3, 1, {1})
    assert found.margins == [1.0]
    assert found.largest == 2.0
    assert found.relative == pytest.approx((4 / (26 + 26 + 81)) ** 0.5)


def test_a_tree_is_known_by_names_and_contents(tmp_path):
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "a.py"
    file.write_text("1")
    before = tree_digest(tmp_path)
    assert tree_digest(tmp_path) == before
    file.write_text("2")
    assert tree_digest(tmp_path) != before
    file.write_text("1")
    file.rename(tmp_path / "tests" / "b.py")
    assert tree_digest(tmp_path) != before


def test_wheels_are_unpacked_beside_what_is_installed(tmp_path):
    with pytest.raises(CannotRun, match=r"no \.whl"), unpacked_wheels(tmp_path):
        pass
    with zipfile.ZipFile(tmp_path / "told_here-1.0-py3-none-any.whl", "w") as wheel:
        info = "told_here-1.0.dist-info"
        wheel.writestr("told_here.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: told-here\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    with unpacked_wheels(tmp_path) as site:
        assert (site / "told_here.py").read_text() == "ANSWER = 42\n"
    assert not site.exists()


def test_a_rehearsal_is_not_written_to_the_benchmarks(capsys):
    assert main(["--rehearse", "--out", str(ROOT / "benchmarks" / "results" / "device")]) == 2
    assert "not kept in benchmarks" in capsys.readouterr().err


def test_parts_run_one_after_the_other_whatever_becomes_of_each(tmp_path, capfd):
    out, models = tmp_path / "out", tmp_path / "models"
    words = ["--device", "cpu", "--out", str(out), "--models", str(models)]
    main([*words, "--parts", "environment", "models", "equality", "invariant"])
    found = Report.read(out).parts
    assert {name: each.state for name, each in found.items()} == {
        "environment": "passed",
        "models": "passed",
        "equality": "passed",
        "invariant": "skipped",
    }
    assert found["equality"].figures[0].target == "float32_differing"
    assert found["equality"].figures[0].value == 0
    assert found["equality"].tables[0].rows[0][1] == "0 of 8"
    # The next run's parts come to those that are there.
    (models / "toy" / "config.json").write_text("{}")
    assert main([*words, "--parts", "prefill"]) == 1
    found = Report.read(out).parts
    assert found["prefill"].state == "failed"
    assert "CheckpointError" in found["prefill"].reason
    assert str(models) not in (out / "report.md").read_text()
    assert found["equality"].state == "passed"
    assert "==== prefill: failed" in (out / "log.txt").read_text()


def test_a_run_without_time_skips_its_parts_and_says_so(tmp_path, capfd):
    start_s = time.monotonic()
    words = ["--device", "cpu", "--out", str(tmp_path), "--models", str(tmp_path / "models")]
    assert main([*words, "--minutes", "0.2", "--parts", "environment", "decode"]) == 0
    found = Report.read(tmp_path).parts
    assert {each.state for each in found.values()} == {"skipped"}
    assert "no time: it takes" in found["decode"].reason
    assert time.monotonic() - start_s < 60
    # With time, what is missing is run, and that only.
    assert main([*words, "--missing", "--parts", "models", "environment"]) == 0
    capfd.readouterr()
    assert main([*words, "--missing", "--minutes", "0.2"]) == 0
    said = capfd.readouterr().out
    assert "models" not in said
    assert "environment" not in said
    assert "[14/14] faults" in said


def test_settings_travel_as_json():
    settings = Settings(shapes=("1b", "8b"), models="m", out="o", is_quick=True)
    assert Settings.from_json(settings.as_json()) == settings


SETTINGS = Settings(shapes=("toy",), models="/models", out="/out", device="cpu")


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Run one part in this process: what `measure` does, and what it needs, are the test's."""

    def run(measure, needs=()):
        module = types.ModuleType("part_of_a_test")
        module.measure = measure
        monkeypatch.setitem(sys.modules, module.__name__, module)
        part = Part("decode", "Decode", module.__name__, Times(1, 1), needs)
        monkeypatch.setitem(BY_NAME, "decode", part)
        record = record_at(tmp_path, "decode")
        record.save()
        path = tmp_path / "result.json"
        code = part_process.main(path, SETTINGS)
        return code, PartResult.from_json(json.loads(path.read_text()))

    return run


def test_a_part_that_fails_keeps_what_it_had_found(ran):
    def measure(_, record):
        record.figure("decode_roofline", "toy", 0.5)
        raise ValueError("it went wrong")

    code, result = ran(measure)
    assert (code, result.state, result.reason) == (1, "failed", "ValueError: it went wrong")
    assert result.figures[0].value == 0.5


def test_a_part_that_lacks_a_package_is_skipped_and_says_which(ran):
    code, result = ran(None, needs=("json", "no_such_package_here", "triton"))
    assert (code, result.state) == (0, "skipped")
    assert result.reason == "not installed: no_such_package_here (see --wheels)"


def test_a_part_that_ends_its_process_has_failed(ran, tmp_path):
    """What the run reads then is the file as it was begun."""

    def measure(_, record):
        record.note("so far")
        raise SystemExit(9)

    with pytest.raises(SystemExit):
        ran(measure)
    result = PartResult.from_json(json.loads((tmp_path / "result.json").read_text()))
    assert (result.state, result.notes) == ("failed", ["so far"])


def test_a_part_past_its_deadline_has_failed(tmp_path):
    settings = replace(SETTINGS, models=str(tmp_path / "models"), out=str(tmp_path))
    part = replace(BY_NAME["models"], times=Times(deadline_s=0.05, least_s=0.01))
    origin = Origin("", "", "", is_rehearsal=True)
    result = run_part(part, settings, origin, Budget(None), environment())
    cut = run_part(
        replace(part, times=Times(deadline_s=60, least_s=0.01)),
        settings,
        origin,
        Budget((RESERVE_S + 0.1) / 60),
        environment(),
    )
    assert (cut.state, cut.reason) == ("skipped", "no time: cut off after 0 s")
    assert (result.state, result.reason) == ("failed", "it ran past its 0 s")
    assert result.wall_s > 0


def test_a_report_names_no_folder_of_the_machine(tmp_path):
    settings = replace(SETTINGS, models=str(tmp_path / "models"), out=str(tmp_path / "out"))
    text = f"{tmp_path}/models/toy and {tmp_path}/out/x and {ROOT}/a.py and {sys.prefix}/lib"
    assert hide_paths(text, settings) in (
        "MODELS/toy and OUT/x and ./a.py and PYTHON/lib",
        "MODELS/toy and OUT/x and ./a.py and ./.venv/lib",
    )


def test_a_companion_makes_one_transfer_for_each_beginning():
    moved = []
    companion = Companion(lambda: moved.append(1))
    for number in (1, 2, 3):
        companion.begin()
        companion.wait()
        assert len(moved) == number
    companion.end()


def test_a_companion_tells_what_its_transfer_ended_with():
    companion = Companion(lambda: [].pop())
    companion.begin()
    with pytest.raises(IndexError):
        companion.wait()
    companion.begin()
    with pytest.raises(IndexError):
        companion.wait()
    companion.end()


def test_the_plot_of_decode_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot_decode({"1b": {1: 0.5, 8: 0.7}, "8b": {1: 0.8}}, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_a_python_without_packages_says_what_it_lacks(tmp_path):
    """The command itself needs none: it must run with whatever Python a machine has."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    words = ["--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")]
    words += ["--device", "cpu", "--parts", "environment", "kernels", "transfer"]
    done = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", "-m", "benchmarks.device_check", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = Report.read(tmp_path / "out").parts
    assert {each.state for each in found.values()} == {"skipped"}
    assert "torch is missing" in found["environment"].reason
    assert "not installed: numpy, pytest" in found["kernels"].reason
    assert "msgspec" in found["transfer"].reason
