"""The command: run seeds, and say what happened.

    python -m neuron_di.testing.sim --seeds 1000 [--start N]
    python -m neuron_di.testing.sim --seed S --trace

Exit status 1 if a promise was broken; each failing seed is named, and replays exactly.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable

from neuron_di.clock import now_s
from neuron_di.testing.sim_cluster import Tally
from neuron_di.testing.sim_trace import about
from neuron_di.testing.swarm import Run, run_seed
from neuron_di.testing.workload import NUM_ALIKE, NUM_REQUESTS, wanted

_TRACED_LINES_MAX = 80


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m neuron_di.testing.sim")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, default=None, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print every event of it")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        run = run_seed(chosen.seed, with_trace=True)
        _say(run.lines if chosen.trace else ())
        _say([f"trace {run.trace_digest}", *describe(run)])
        return int(bool(run.failures))
    if chosen.seeds < 1:
        parser.error("--seeds is to be 1 or more: nothing would be tried")
    for number in range(NUM_REQUESTS + NUM_ALIKE):
        wanted(number)  # the right answers are no part of what is timed
    tally, failing, failures = Tally(), [], Counter[str]()
    start_s = now_s()
    for seed in range(chosen.start, chosen.start + chosen.seeds):
        run = run_seed(seed)
        tally.add(run.tally)
        if run.failures:
            failing.append(seed)
            failures.update(failure.kind for failure in run.failures)
            _say(describe(run))
    _say(report(tally, failures, failing, now_s() - start_s))
    return int(bool(failing))


def describe(run: Run) -> list[str]:
    """What was broken, and the trace of the requests it happened to."""
    if not run.failures:
        return [f"seed {run.seed}: every promise was kept"]
    words = [f"seed {run.seed}: {failure}" for failure in run.failures]
    requests = list(dict.fromkeys(f.request for f in run.failures if f.request))
    for name in requests[:2]:
        lines = about(run.lines, name)
        words += [f"  events of {name}, the last {_TRACED_LINES_MAX}:"]
        words += [f"    {line}" for line in lines[-_TRACED_LINES_MAX:]]
    return [*words, f"  replay: make sim SEED={run.seed}"]


def report(
    tally: Tally, failures: Counter[str], failing: list[int], elapsed_s: float
) -> Iterable[str]:
    """The summary of some runs."""
    yield f"seeds       {tally.num_seeds}"
    yield f"requests    {tally.num_requests}"
    is_equal = "each token-equal to its undisturbed run" if not failures["wrong"] else "some wrong"
    yield f"completed   {tally.num_completed}, {is_equal}"
    yield f"cancelled   {tally.num_cancelled} by their clients"
    yield f"cut off     {tally.num_cut_off} with their proxy"
    yield (
        f"continued   {tally.num_continued}, {tally.num_preempted} of them preempted, "
        f"retried {tally.num_retried}"
    )
    yield f"prefixes    {_list(tally.prefixes)}"
    yield f"errors      {_list(tally.errors)}"
    yield f"faults      {_list(tally.faults)}"
    for kind in ("wrong", "hidden", "lost", "stuck", "leaked", "bug"):
        yield f"{kind:<11} {failures[kind]}"
    per_seed_s = elapsed_s / max(tally.num_seeds, 1)
    yield f"speed       {1 / per_seed_s:.1f} seeds/s, {tally.num_callbacks} callbacks"
    yield f"            {tally.virtual_s:.0f} virtual seconds in {elapsed_s:.1f} s"
    if failing:
        yield f"failing     {' '.join(map(str, failing))}"


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


def _say(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
