"""Seven faults at six phases, on real processes: nothing is wrong, lost, leaked or stuck."""

from collections.abc import Callable

import pytest

from .case import Requests, run_case
from .cluster import Cluster, until
from .fault import PHASES, Fault, Phase
from .faults import FAULTS
from .report import CaseReport

pytestmark = pytest.mark.e2e

# A restart at the same port takes turns: of the prefill worker early, of the decode worker late.
CASES: list[tuple[Fault, Phase]] = [
    (FAULTS[name], phase)
    for phase in PHASES
    for name in (
        "F05",
        "F08",
        "F14",
        "F34",
        "F09" if phase in ("q", "p", "k") else "F18",
        "F17",
        "F63",
    )
]


def test_there_are_42_cases():
    assert len(CASES) == len({(fault.name, phase) for fault, phase in CASES}) == 42


@pytest.mark.asyncio(loop_scope="session")
async def test_kv_moves_as_that_of_serve(cluster: Cluster):
    """By blocks that change their owner: whatever ends in the middle, none is lost."""

    async def every_pair_has_a_lane() -> bool:
        """They are tried out without a request, in their own time."""
        statuses = [await cluster.status_of(name) for name in cluster.places if "decode" in name]
        lanes = [lane["engine"] for status in statuses if status for lane in status["lanes"]]
        assert set(lanes) <= {"handover"}
        return len(lanes) >= 4

    await until(every_pair_has_a_lane)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("number", "fault", "phase"),
    [
        pytest.param(i, fault, phase, id=f"{fault.name}-{phase}")
        for i, (fault, phase) in enumerate(CASES)
    ],
)
async def test_a_fault_at_a_phase(
    number: int,
    fault: Fault,
    phase: Phase,
    cluster: Cluster,
    requests: Requests,
    keep: Callable[[CaseReport], None],
) -> None:
    report = await run_case(cluster, fault, phase, requests, number)
    keep(report)
    assert report.failures == []
