from pathlib import Path

import pytest

from neuron_di.testing.handoff_diagram import descriptions, handoff_page
from neuron_di.wire.handoff import (
    LAUNCH,
    RECEIVER,
    SENDER,
    LaunchState,
    ReceiverState,
    SenderState,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "handoff.md"


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text(encoding="utf-8") == handoff_page(), "run `make handoff-diagram`"


@pytest.mark.parametrize("kind", [SenderState, ReceiverState, LaunchState])
def test_every_state_is_described(kind):
    assert descriptions(kind).keys() == set(kind)


@pytest.mark.parametrize("table", [SENDER, RECEIVER, LAUNCH])
def test_every_row_is_drawn_and_listed(table):
    page = handoff_page()
    for (state, event), step in table.items():
        next_state = "(same)" if step.state is state else step.state.value
        assert f"| {state.value} | {event.value} | {next_state} | " in page
        arrows = [
            line
            for line in page.splitlines()
            if f" {state.value} --> {step.state.value} : " in line
        ]
        assert any(event.value in arrow for arrow in arrows)


def test_labels_have_no_sign_that_mermaid_reads_as_its_own():
    for line in handoff_page().splitlines():
        if " --> " in line and "[*]" not in line:
            label = line.split(" : ", 1)[1]
            assert not set(':;%#"') & set(label), line
