"""What an operator is told who does not wait for the end of an order."""

from collections.abc import Iterator

import pytest

from neuron_di.cli import main
from neuron_di.order_terminal import Order, show_order
from neuron_di.wire.admin import DrainProgress
from neuron_di_proxy.admin_order import AdminLine, Phase

NOT_YET = "nobody has said yet that it began: `neuron-di status` shows whether it did"
DRAINS = "the drain goes on without you: the same order again joins it"
CHANGES = "the change goes on without you: `neuron-di status` shows which role it ends in"


@pytest.mark.parametrize(
    ("order", "phases", "words"),
    [
        ("drain", [], NOT_YET),
        ("drain", ["draining"], DRAINS),
        ("drain", ["draining", "drained", "left"], DRAINS),
        ("role", [], NOT_YET),
        ("role", ["prepared"], NOT_YET),  # a ticket that nobody uses expires
        ("role", ["prepared", "draining"], CHANGES),
        ("role", ["prepared", "drained"], CHANGES),
    ],
)
def test_who_interrupts_hears_what_becomes_of_it(
    capsys: pytest.CaptureFixture[str], order: Order, phases: list[Phase], words: str
) -> None:
    def lines() -> Iterator[AdminLine]:
        for phase in phases:
            progress = DrainProgress(state="draining") if phase == "draining" else None
            yield AdminLine(phase=phase, progress=progress)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_order("w", lines(), order)
    assert capsys.readouterr().out.splitlines()[-1] == words


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9", "soon", ""])
@pytest.mark.parametrize("order", [["drain", "w"], ["role", "w", "decode"]])
def test_a_time_to_finish_is_a_length_of_time(
    capsys: pytest.CaptureFixture[str], order: list[str], text: str
) -> None:
    assert main([*order, "--timeout-s", text]) == 2
    assert f"--timeout-s: invalid seconds value: {text!r}" in capsys.readouterr().err


def test_those_that_gave_way_are_told_apart_from_those_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = DrainProgress(state="drained", num_finished=2, num_preempted=3, is_withdrawn=True)
    lines = [AdminLine(phase="done", is_clean=True, progress=progress)]
    assert show_order("w", lines) == 0
    assert capsys.readouterr().out == (
        "✓ w has ended: 2 requests finished, none failed, 3 gave way to others, "
        "to go on elsewhere\n"
    )
