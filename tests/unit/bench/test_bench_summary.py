"""Figures, their JSON, their table and their picture."""

import io
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from bench_kit import ask, measured
from rich.console import Console

from neuron_di.bench.command import _write
from neuron_di.bench.document import from_json, to_json
from neuron_di.bench.plan import Plan
from neuron_di.bench.plot import plot
from neuron_di.bench.report import print_report
from neuron_di.bench.run import Run, Strain, Turn, order_of_turns
from neuron_di.bench.settings import make_settings
from neuron_di.bench.slo import Slo
from neuron_di.bench.summary import summarize
from neuron_di.errors import ConfigError, NeuronDiError


def run_of(*endpoints, wall_s=10.0, strain=None, **given):
    """A run whose endpoints have these requests, each slice in a turn of its own."""
    urls = tuple(f"http://{at}" for at in range(len(endpoints)))
    settings = make_settings({"urls": urls, "rate": 5.0} | given)
    found = [measured(*requests) for requests in endpoints]
    turns = [
        Turn(place, index, 100.0 + at * wall_s, 100.0 + (at + 1) * wall_s, 3)
        for at, (index, place) in enumerate(order_of_turns(len(urls), settings.slices))
    ]
    shown = [
        SimpleNamespace(name=name, url=url, model="tiny", by_usage=True, prompts_are_ids=True,
                        notes=["a note"], client=SimpleNamespace(num_reconnects=0))
        for name, url in zip(settings.names, urls, strict=True)
    ]  # fmt: skip
    plan = Plan(
        at_s=np.zeros(1) if settings.loop == "open" else None,
        input_tokens=np.ones(1, int),
        output_tokens=np.ones(1, int),
    )
    return Run(settings=settings, endpoints=shown, plan=plan, measured=found, turns=turns,
               strain=strain or Strain(cpu_s=1.0, wall_s=100.0, stall_s=0.004),
               started_unix_s=1_700_000_000.0)  # fmt: skip


MIXED = [
    ask(at=100, ttft=0.1, gaps=[0.01] * 9, planned=100),
    ask(at=101, ttft=0.3, gaps=[0.02] * 9, planned=100, late=0.02),
    ask(at=102, ttft=0.9, gaps=[0.01] * 9, planned=5000),
    ask(at=103, ending="refused_429", planned=600, why="status 429: \x1b[31mslow down"),
    ask(at=104, ending="cut", planned=100, why="reset"),
    ask(at=105, ending="cut", planned=100, why="another"),
    ask(at=106, ending="interrupted", planned=100),
]


def text_of(document, width=100):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    print_report(document, console)
    return console.file.getvalue()


def test_figures():
    (found,) = summarize(run_of(MIXED, slo=Slo(ttft_ms=500))).endpoints
    figures = found.figures
    assert (figures.num_ok, figures.num_failed, figures.num_good, found.num_interrupted) == (
        3,
        3,
        2,
        1,
    )
    assert {name: each.num for name, each in found.failures.items()} == {"refused_429": 1, "cut": 2}
    assert found.failures["cut"].example == "reset"
    assert figures.ttft_ms.p50 == pytest.approx(300)
    assert found.ttft_from_sent_ms.p50 == pytest.approx(280)
    assert figures.itl_ms.num == 27  # gaps of answers that failed are not among them
    assert figures.tpot_ms.max == pytest.approx(20)
    assert figures.e2e_ms.max == pytest.approx(990)
    assert found.lag_ms.max == pytest.approx(20)


def test_rates_are_over_the_turns_and_of_whole_answers():
    (found,) = summarize(run_of(MIXED, slo=Slo(ttft_ms=500))).endpoints
    assert found.requests_per_s == pytest.approx(0.3)
    assert found.goodput_per_s == pytest.approx(0.2)
    assert found.output_tokens_per_s == pytest.approx(3.0)
    assert found.total_tokens_per_s == pytest.approx((5200 + 30) / 10)


def test_classes_of_prompts():
    (found,) = summarize(run_of(MIXED, slo=Slo(ttft_ms=500))).endpoints
    counts = {each.name: (each.figures.num_ok, each.figures.num_failed, each.figures.num_good)
              for each in found.classes}  # fmt: skip
    assert counts == {"short": (2, 2, 2), "medium": (0, 1, 0), "long": (1, 0, 0)}


def test_a_closed_loop_knows_only_one_kind_of_time():
    (found,) = summarize(run_of([ask()], rate=None, concurrency=2)).endpoints
    assert found.ttft_from_sent_ms is None


def test_no_figure_is_cut_where_a_terminal_is_narrow():
    document = summarize(run_of(MIXED, MIXED, slo=Slo(ttft_ms=500), slices=1))
    wide = [line.split() for line in text_of(document, 200).splitlines()]
    narrow = [line.split() for line in text_of(document, 20).splitlines()]
    for words in wide:
        assert words in narrow or words[0] in ("failed", "refused_429", "cut")


def test_an_empty_run():
    document = summarize(run_of([]))
    assert document.endpoints[0].figures.ttft_ms is None
    assert "0 ok" in text_of(document)


@pytest.mark.parametrize(
    ("num_endpoints", "num_slices", "order"),
    [(1, 3, "AAA"), (2, 1, "AB"), (2, 4, "ABBAABBA"), (3, 2, "ABCCBA")],
)
def test_the_order_of_turns(num_endpoints, num_slices, order):
    turns = list(order_of_turns(num_endpoints, num_slices))
    assert "".join("ABC"[place] for _, place in turns) == order
    assert len(set(turns)) == len(turns)


def two():
    first = [ask(at=at, ttft=0.1, slice_index=at % 4) for at in range(8)]
    second = [ask(at=at, ttft=0.1 * (1 + at % 4), slice_index=at % 4) for at in range(8)]
    return run_of(first, second)


def test_ratios_by_slice():
    document = summarize(two())
    ratio = {each.figure: each for each in document.ratios}["TTFT p50"]
    assert ratio.by_slice == pytest.approx([1, 2, 3, 4])
    assert (ratio.median, ratio.least, ratio.most) == pytest.approx((2.5, 1, 4))
    assert (ratio.name, ratio.over) == ("B", "A")


def test_a_slice_that_only_one_has_done_is_no_ratio():
    run = two()
    run.turns = run.turns[:3]  # A0 B0 B1
    assert {len(each.by_slice) for each in summarize(run).ratios} == {1}


def test_json_round_trip_prints_the_same():
    for run in (run_of(MIXED, slo=Slo(ttft_ms=500)), two(), run_of([])):
        document = summarize(run)
        again = from_json(to_json(document))
        assert again == document
        assert text_of(again) == text_of(document)


def test_the_table():
    document = summarize(run_of(MIXED, slo=Slo(ttft_ms=500)))
    text = text_of(document)
    assert "3 ok, 3 failed, 1 interrupted in 10.0 s" in text
    assert "0.20 requests/s, 33.3% good: TTFT <= 500 ms" in text
    assert "from sent" in text
    assert "refused_429" in text
    assert "\x1b" not in text  # what an endpoint says commands no terminal
    assert (
        max(map(len, text_of(document, 80).split("by prompt")[1].split("failed  ")[0].split("\n")))
        <= 80
    )


def test_a_comparison_says_how_often_it_was_better():
    text = text_of(summarize(two()))
    assert "B / A  ratio in each of 4 slices" in text
    (line,) = (line for line in text.splitlines() if line.startswith("TTFT p50"))
    assert line.split()[2:] == ["2.500", "1.000", "4.000", "0", "of", "4"]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of([ask()], strain=Strain(cpu_s=9.0, wall_s=10.0)), "90% of a core"),
        (
            run_of([ask()], strain=Strain(cpu_s=0.1, wall_s=10.0, stall_s=0.2)),
            "stood still for 200 ms",
        ),
        (run_of([ask(late=0.5)]), "up to 500 ms late"),
    ],
)
def test_a_client_that_does_not_keep_up_says_so(run, words):
    assert any(words in warning for warning in summarize(run).client.warnings)
    assert "warning: " in text_of(summarize(run))


def test_a_client_that_keeps_up_says_nothing():
    assert summarize(run_of([ask()])).client.warnings == []


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_picture(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    plot(summarize(two()), path)
    assert path.stat().st_size > 5000


NONE_OK = [ask(at=1, ending="connection")]


@pytest.mark.parametrize(
    "run",
    [
        run_of([]),
        run_of(MIXED),
        run_of(MIXED[3:], MIXED, slices=1),
        run_of(MIXED, NONE_OK, slices=1),
    ],
)
def test_a_picture_of_whatever_there_is(tmp_path, run):
    plot(summarize(run), tmp_path / "a.png")


def test_a_picture_of_no_kind(tmp_path):
    with pytest.raises(ConfigError, match="--plot"):
        plot(summarize(two()), tmp_path / "a.xyz")


@pytest.mark.parametrize("flag", ["json", "plot"])
def test_figures_that_cannot_be_written_are_no_run_that_could_not_start(flag, tmp_path):
    path = tmp_path / "gone" / "a.png"  # whose folder was there when the run began
    flags = Namespace(**{"json": None, "plot": None, flag: str(path)})
    with pytest.raises(NeuronDiError, match=f"^--{flag} {path}: No such file") as raised:
        _write(summarize(two()), flags)
    assert not isinstance(raised.value, ConfigError)


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[plot\]'"):
        plot(summarize(two()), tmp_path / "a.png")
