"""A Neuron runtime that hangs is asked once in a run, though each check has its own process."""

from neuron_machines import instance, machine, options, simulated

from neuron_di.doctor import neuron_asked, neuron_devices, neuron_memory, neuron_software
from neuron_di.doctor.answer_page import AnswerPage
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.runner import run_apart

FAULT = "function=nrt_get_total_vnc_count hang_ms=60000"


def test_a_library_that_hangs_is_asked_once(tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    plain = neuron_asked.ask

    def ask(*arguments, **named):
        with asked.open("a") as file:
            file.write(f"{arguments[2]} ")
        return plain(*arguments, **named)

    monkeypatch.setattr(neuron_asked, "ask", ask)
    monkeypatch.setattr(neuron_asked, "LIBRARY_TIMEOUT_S", 4.0)
    root = instance(tmp_path / "root", "trn1.32xlarge")
    looked_at = machine(root, simulated(tmp_path / "sim", NRT_SIM_FAULTS=FAULT))
    found = {}
    for module in (neuron_devices, neuron_software, neuron_memory):
        run = lambda check=module.check: check(looked_at, options())  # noqa: E731
        found |= {each.check: each for each in run_apart(run, name=module.__name__, timeout_s=100)}
    assert asked.read_text() == "library "
    assert found["neuron.cores"].grade == Grade.FAILED
    assert "did not come back in time" in found["neuron.cores"].says
    assert found["neuron.runtime"].grade == Grade.OK, "what it said before it hung is known"
    assert found["neuron.memory"].says == "the runtime hangs when it is asked without a core"


def test_a_page_holds_an_answer_or_none():
    page = AnswerPage()
    assert page.read() == ""
    page.write("x" * 70_000)
    assert page.read() == ""
    page.write("ümlaut")
    assert page.read() == "ümlaut"
