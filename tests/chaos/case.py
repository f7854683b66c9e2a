"""Runs one case: requests on one pair of workers, held at a phase, a fault, and its aftermath."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuron_di.clock import now_s, unix_s

from .client import Manners, Stream, ask
from .cluster import MODEL_NAME, Cluster, Place
from .fault import PHASE_NAMES, Fault, Phase, Scene
from .judge import Verdict, judge
from .process import TestedProcess
from .report import CaseReport

COME_TIMEOUT_S = 30.0
LEAK_TIMEOUT_S = 60.0  # leases and quarantines end before
ABANDONED_TOKENS = 3000  # some seconds of decoding
FREED_S_MAX = 2.0  # after the client has left
_SIGNS = ("worker_down", "worker_frozen", "worker_suspect", "attempt_failed")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and its answer by workers that nobody disturbs."""

    body: dict[str, Any]
    expected: Stream


class Requests:
    """The requests of every case: greedy and drawn, of one chunk and of two, with a stop string."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.all = list(asked)

    @classmethod
    async def learn(cls, cluster: Cluster) -> "Requests":
        """Ask each once, while nothing is disturbed."""
        base = {
            "model": MODEL_NAME,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 0,
            "ignore_eos": True,
            "max_tokens": 48,
        }
        drawn = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5}
        bodies: list[dict[str, Any]] = [
            base | {"prompt": "def main(", "temperature": 0},
            base | {"prompt": "import asyncio\n" * 9, "seed": 7} | drawn,
            base | {"prompt": "class Reader:\n    pass\n" * 90, "temperature": 0, "max_tokens": 40},
            base | {"prompt": "return [", "seed": 11, "repetition_penalty": 1.1} | drawn,
        ]
        streams = [await ask(cluster.url, body) for body in bodies]
        # A stop string in the last third, so that half of one may be held back at a fault.
        text = streams[3].text
        bodies[3]["stop"] = text[2 * len(text) // 3 :][:5]
        streams[3] = await ask(cluster.url, bodies[3])
        if any(stream.end != "done" or len(stream.tokens) < 8 for stream in streams):
            raise AssertionError(f"undisturbed, yet {[stream.end for stream in streams]}")
        return cls([Asked(*pair) for pair in zip(bodies, streams, strict=True)])


async def run_case(
    cluster: Cluster, fault: Fault, phase: Phase, requests: Requests, number: int
) -> CaseReport:
    """Run one case. `number` says which of the workers are the victims."""
    report = CaseReport(
        fault=fault.name, title=fault.title, phase=phase, outcome=fault.outcomes[phase]
    )
    await cluster.ready()
    prefill, decode, *others = _cast(cluster, number)
    cluster.hide(*(name for name in cluster.places if name not in (prefill.name, decode.name)))
    await cluster.relay.flush()
    holder = _holder(fault, phase, prefill, decode)
    with holder.hold(PHASE_NAMES[phase]) as hold:
        scene = Scene(cluster, prefill, decode, hold.let_go)
        manners = [fault.manners(scene) for _ in requests.all]
        # Whoever is given up must not come to its end before that shows.
        longer = {"max_tokens": ABANDONED_TOKENS} if report.outcome == "A" and phase != "f" else {}
        streams = scene.streams = [
            asyncio.create_task(ask(cluster.url, asked.body | longer, each))
            for asked, each in zip(requests.all, manners, strict=True)
        ]
        try:
            await hold.come(COME_TIMEOUT_S)
            shown = {prefill.name, decode.name, *(place.name for place in others)}
            cluster.hide(*(cluster.places.keys() - shown))
            await cluster.relay.flush()
            struck_s, struck_unix_s = now_s(), unix_s()
            await fault.strike(scene)
            bystander = asyncio.create_task(ask(cluster.url, requests.all[0].body, Manners()))
            answers = await asyncio.gather(*streams)
            passed_by = await bystander
        except BaseException:
            for task in streams:
                task.cancel()
            cluster.calm()
            raise
    if report.outcome == "A":  # nobody needs to be healed first
        leaked = await cluster.leaked(LEAK_TIMEOUT_S)
        report.freed_s = now_s() - struck_s
        await fault.after(scene)
    else:
        await fault.after(scene)
        leaked = await cluster.leaked(LEAK_TIMEOUT_S)
    report.num_leaked = sum(leaked.values())
    report.failures += [f"not at home: {kind} {count}" for kind, count in leaked.items()]
    _count(report, fault, requests, answers, passed_by)
    _read_log(report, cluster.proxy, struck_unix_s, [*answers, passed_by])
    _conclude(report, cluster)
    await _revive(cluster)
    return report


def _cast(cluster: Cluster, number: int) -> list[Place]:
    """The pair that the requests go to, then the pair that may take over."""
    cast = []
    for role in ("prefill", "decode"):
        places = [place for place in cluster.places.values() if place.role == role]
        two = [place for place in places if place.is_chosen]
        cast.append([two[(number + i) % 2] for i in range(2)])
    (prefill, other_prefill), (decode, other_decode) = cast
    return [prefill, decode, other_prefill, other_decode]


def _holder(fault: Fault, phase: Phase, prefill: Place, decode: Place) -> Place:
    if phase == "q":
        return prefill if fault.queued_at == "prefill" else decode
    return prefill if phase in ("p", "k") else decode


def _count(
    report: CaseReport,
    fault: Fault,
    requests: Requests,
    answers: Sequence[Stream],
    passed_by: Stream,
) -> None:
    verdicts = [
        judge(stream, asked.expected)
        for asked, stream in zip(
            [*requests.all, requests.all[0]], [*answers, passed_by], strict=True
        )
    ]
    report.num_requests = len(verdicts)
    report.num_completed = sum(each.is_completed for each in verdicts)
    report.num_equal = sum(each.is_equal for each in verdicts)
    # The last one came just after the fault, and has nothing to do with it.
    due = verdicts if _is_survived(report) else verdicts[-1:]
    due = due if fault.spares_others else due[:-1]
    report.num_due, report.num_due_equal = len(due), sum(each.is_equal for each in due)
    report.num_wrong = sum(each.is_wrong for each in verdicts)
    report.num_misnumbered = sum(each.is_misnumbered for each in verdicts)
    report.num_stuck = sum(each.is_stuck for each in verdicts)
    report.num_continued = sum(each.num_continued > 0 for each in verdicts)
    report.num_left = sum(each.has_left for each in verdicts)
    report.errors.update(each.error_code for each in verdicts if each.error_code)
    report.gap_s = max(stream.gap_s() for stream in answers)
    report.failures += [each.words for each in verdicts if each.words]
    _check_outcome(report, fault, verdicts)


def _is_survived(report: CaseReport) -> bool:
    """True when every request of the case must come to its end."""
    return report.outcome not in ("A", "E", "N/A")


def _check_outcome(report: CaseReport, fault: Fault, verdicts: Sequence[Verdict]) -> None:
    """The letter that the matrix says, for every request of the case."""
    if report.num_stuck:
        report.failures.append(f"{report.num_stuck} requests are stuck")
    *struck, passed_by = verdicts
    if fault.spares_others and not passed_by.is_equal:
        report.failures.append(f"the bystander was not served: {passed_by.error_code}")
    if _is_survived(report) and not all(each.is_equal for each in struck):
        report.failures.append(f"{sum(not each.is_equal for each in struck)} were not completed")
    if report.outcome == "A":
        gone = [
            each.has_left if fault.hangs_up == "client" else each.error_code == "connection_cut"
            for each in struck
        ]
        if not all(
            is_gone or each.is_completed for is_gone, each in zip(gone, struck, strict=True)
        ):
            report.failures.append("not every connection ended")
        if report.freed_s is not None and report.freed_s > FREED_S_MAX and not report.num_leaked:
            report.failures.append(f"freed only after {report.freed_s:.1f} s")
    if report.outcome == "N/A" and not all(
        each.is_equal or each.error_code == "connection_cut" for each in struck
    ):
        report.failures.append("neither served nor cut")
    if report.outcome == "E" and not all(each.error_code for each in struck):
        report.failures.append("not every request got its error")


def _read_log(
    report: CaseReport, proxy: TestedProcess, struck_unix_s: float, streams: Sequence[Stream]
) -> None:
    """Attempts that failed after the fault, and when the proxy first noticed."""
    # The log's clock has milliseconds.
    lines = [line for line in proxy.events if line.unix_s >= struck_unix_s - 0.001]
    signs = [line for line in lines if line.event in _SIGNS]
    if signs:
        report.detect_s = max(0.0, signs[0].unix_s - struck_unix_s)
    begun = set()
    for line in signs:
        if line.event == "attempt_failed":
            fields = dict(part.split("=", 1) for part in line.fields.split())
            if int(fields["first_index"]) + int(fields["tokens"]) > 0:
                begun.add(fields["request"])
            else:
                report.num_retried += 1
    for stream in streams:
        is_due = stream.answer_id.removeprefix("cmpl-") in begun
        if stream.end == "done" and is_due != (stream.continued()[0] > 0):
            report.failures.append("an answer does not say truly whether it was continued")
    if report.outcome == "R" and not report.num_retried:
        report.failures.append("nothing was tried again")
    if report.outcome == "R/C" and not report.num_retried + report.num_continued:
        report.failures.append("nothing was tried again or continued")
    if report.outcome == "C" and not report.num_continued:
        report.failures.append("nothing was continued")


def _conclude(report: CaseReport, cluster: Cluster) -> None:
    """A process that lives must have ended nothing but its part, and logged no bug."""
    for process in (cluster.proxy, *(place.process for place in cluster.places.values())):
        report.failures += [f"logged: {line}" for line in process.new_complaints()]


async def _revive(cluster: Cluster) -> None:
    """Whoever was killed starts again, while other cases run."""
    for place in cluster.places.values():
        if not place.process.is_alive:
            await cluster.restart(place.name)
