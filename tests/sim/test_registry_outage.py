"""F26: the registry is away for ten minutes, and back with keys of the dead."""

import pytest

from neuron_di.testing.sim_outage import CLIENTS, run_outage


@pytest.mark.parametrize("seed", range(3))
def test_ten_minutes_without_a_registry_cost_no_request(seed):
    run = run_outage(seed)
    assert [str(failure) for failure in run.failures] == []
    assert run.tally.num_completed == CLIENTS
    assert run.tally.virtual_s > 600


def test_what_it_takes_is_noticed_when_it_is_missing(monkeypatch):
    """Were last views not kept, requests would fail."""
    monkeypatch.setattr("neuron_di.registry.directory.Directory.workers", lambda _: ())
    run = run_outage(1, outage_s=60.0, num_clients=40)
    assert "lost" in {failure.kind for failure in run.failures}
