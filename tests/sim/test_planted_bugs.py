"""Negative controls: with any one protection taken away, the simulation must notice."""

import sys

import pytest
from planted_bugs import MASKED, PLANTED

from neuron_di.testing.sim import describe, main
from neuron_di.testing.swarm import run_seed

SEEDS_MAX = 1000
# The first seed that notices, where that is a late one: it is tried before all others. Where the
# simulation has changed since, it may be another run and notice nothing: then all are tried.
NOTICED_BY = {
    "layers that came early are believed": 21,
    "blocks are reused while they are written": 438,
    "blocks are taken that were given up": 522,
    "KV of the decode kernel is kept": 62,
    "pieces whose copy failed stay": 124,
    "a continuation starts from nothing": 49,
    "errors of the engine are dropped": 215,
    "nothing is tried again": 31,
    "a leg that is not wanted is not closed": 32,
    "an ended decode leg forgets its hand-over": 32,
    "blocks that are given up look as before": 77,
    "a lost worker's legs are not told": 82,
    "decode's tokens overtake prefill's": 26,
    "a worker that drains takes new legs": 30,
}
CAUGHT = []


def seed_that_notices(name):
    """A seed that breaks a promise while this bug is there; None: no seed does.

    It does so twice: where this test's time is over within a step, the engine takes that for a
    failure of its own, once.
    """
    with PLANTED[name]():
        for seed in (NOTICED_BY.get(name, 0), *range(SEEDS_MAX)):
            if run_seed(seed).failures and run_seed(seed).failures:
                return seed
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name, record_property, capsys):
    seed = seed_that_notices(name)
    record_property("seed", seed)
    with capsys.disabled():
        words = "not caught" if seed is None else f"caught by seed {seed}"
        sys.stdout.write(f"\n  planted: {name}: {words} ")
    assert seed is not None
    CAUGHT.append(name)
    assert not run_seed(seed).failures, "the seed must be a good one without the bug"


def test_there_are_enough_of_them(capsys):
    with capsys.disabled():
        sys.stdout.write(f"\n  caught/planted in this run: {len(CAUGHT)}/{len(PLANTED)} ")
    assert len(PLANTED) >= 20
    assert set(NOTICED_BY) <= set(PLANTED)


@pytest.mark.parametrize("name", MASKED)
def test_what_is_masked_can_be_planted(name):
    plant, why = MASKED[name]
    assert why
    with plant():
        run_seed(0)  # the bug is there, and a second protection with it


def test_a_failing_seed_is_described_and_named(capsys):
    with PLANTED["digests are not compared"]():
        seed = seed_that_notices("digests are not compared")
        run = run_seed(seed)
        assert main(["--start", str(seed), "--seeds", "1"]) == 1
    wrong = next(failure for failure in run.failures if failure.kind == "wrong")
    words = "\n".join(describe(run))
    assert wrong.request in words
    assert f"make sim SEED={seed}" in words
    assert "says Token" in words  # its events
    assert capsys.readouterr().out.rstrip().endswith(f"failing     {seed}")
