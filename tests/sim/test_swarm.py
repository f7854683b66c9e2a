"""At least 1,000 simulated clusters, each with faults of its own: every promise must be kept."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from neuron_di.testing.sim import describe, main
from neuron_di.testing.swarm import run_seed

SEEDS = 1000
SEEDS_PER_TEST = 100
FOUND = Counter()  # of KV that was kept, in all seeds that were run
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def known_seeds():
    """(seed, what it once broke) of each line that is not a comment."""
    lines = REGRESSIONS.read_text(encoding="utf-8").splitlines()
    named = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(int(seed), reason) for seed, reason in named]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", range(0, SEEDS, SEEDS_PER_TEST))
def test_every_promise_is_kept(start):
    broken = []
    num_completed = num_continued = 0
    for seed in range(start, start + SEEDS_PER_TEST):
        run = run_seed(seed)
        num_completed += run.tally.num_completed
        num_continued += run.tally.num_continued
        FOUND.update(run.tally.prefixes, seeds=1, runs=int(run.tally.prefixes["found"] > 0))
        if run.failures:
            broken += describe(run)
    assert not broken, "\n".join(broken)
    # A simulation in which nothing comes to an answer would keep every promise, too.
    assert num_completed > 10 * SEEDS_PER_TEST / 2
    assert num_continued > SEEDS_PER_TEST / 2


def test_kv_of_prompts_was_found_and_gave_way():
    """Where none is found, none that is wrong is noticed."""
    if FOUND["seeds"] < SEEDS:
        pytest.skip(f"{FOUND['seeds']} seeds were run, of {SEEDS}")
    assert FOUND["runs"] > SEEDS / 5
    assert FOUND["found"] > SEEDS * 3
    assert FOUND["found by a continuation"] > SEEDS
    assert FOUND["found, blocks changed owner"] > SEEDS / 10
    assert FOUND["gave way to a piece"] > SEEDS
    assert FOUND["gave way to a request"] > SEEDS


@pytest.mark.parametrize(("seed", "reason"), known_seeds())
def test_what_was_broken_once_holds(seed, reason):
    run = run_seed(seed)
    assert not run.failures, "\n".join([reason, *describe(run)])


def test_a_seed_is_the_same_run_in_every_process():
    script = (
        "from neuron_di.testing.swarm import run_seed\n"
        "print([run_seed(seed, with_trace=True).trace_digest for seed in range(8)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1", "PATH": ""},
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0] == f"{[run_seed(seed, with_trace=True).trace_digest for seed in range(8)]}\n"
    assert len(set(said[0].split(","))) == 8


def test_the_command_replays_a_seed(capsys):
    assert main(["--seed", "3", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "seed 3: every promise was kept"
    assert any("lookup_all" in line for line in lines)
    assert any("completed after" in line for line in lines)


def test_the_command_reports_some_seeds(capsys):
    assert main(["--start", "40", "--seeds", "3"]) == 0
    report = capsys.readouterr().out
    assert "requests    60" in report
    assert "seeds/s" in report
    assert "failing" not in report


def test_no_seeds_keep_no_promise(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--seeds", "0"])
    assert ended.value.code == 2
    assert "nothing would be tried" in capsys.readouterr().err
