import json

import pytest

from benchmarks.device_check.__main__ import main
from benchmarks.device_check.budget import RESERVE_S, Budget, Times
from benchmarks.device_check.parts import BY_NAME, PARTS
from benchmarks.device_check.record import Record
from benchmarks.device_check.report import Report, ReportError, merge, shortfalls
from benchmarks.device_check.result import Figure, Origin, PartResult, Table
from benchmarks.device_check.targets import TARGETS, verdict

ON_GPU = Origin("commit a", "a GPU", "a command", is_rehearsal=False)
REHEARSAL = Origin("commit a", "no GPU", "a command --rehearse", is_rehearsal=True)


def result(name, state="passed", *, at_s=1.0, origin=ON_GPU, **fields):
    reason = "" if state == "passed" else "its reason"
    return PartResult(
        name=name, origin=origin, started_unix_s=at_s, state=state, reason=reason, **fields
    )


def written(folder, *results, files=()):
    report = Report()
    for each in results:
        report.add(each)
    report.write(folder)
    for name in files:
        (folder / name).write_bytes(name.encode())
    return folder


@pytest.mark.parametrize(
    ("target", "value", "is_met"),
    [
        ("decode_roofline", 0.6, True),
        ("decode_roofline", 0.59, False),
        ("step_while_moving", 1.05, True),
        ("step_while_moving", 1.06, False),
        ("float32_differing", 0, True),
        ("float32_differing", 1, False),
        ("prefill_rate", float("nan"), False),
        ("bfloat16_logits", float("nan"), False),
    ],
)
def test_a_figure_is_judged_by_its_target(target, value, is_met):
    words = verdict(Figure(target, "1b", value), is_rehearsal=False)
    assert words == ("met" if is_met else "UNMET")


def test_a_rehearsals_figures_are_not_judged():
    bad = Figure("decode_roofline", "toy", 0.0)
    assert verdict(bad, is_rehearsal=True) == "rehearsal: means nothing"
    assert verdict(Figure("", "toy", 0.0), is_rehearsal=False) == "no target"
    assert shortfalls(result("decode", figures=[bad], origin=REHEARSAL)) == []
    assert shortfalls(result("decode", figures=[bad])) == [
        f"{TARGETS['decode_roofline'].words}, toy: 0"
    ]


def test_the_budget_gives_what_is_left_and_no_more():
    now = [100.0]
    budget = Budget(2, lambda: now[0])
    assert budget.deadline_s(Times(deadline_s=60, least_s=30)) == 60
    now[0] += 120 - RESERVE_S - 40
    assert budget.deadline_s(Times(60, 30)) == pytest.approx(40)
    assert budget.deadline_s(Times(60, 41)) is None
    assert "takes 41 s or more, and 40 s are left" in budget.words(Times(60, 41))
    now[0] += 1000
    assert budget.left_s() == 0.0
    assert budget.deadline_s(Times(60, 1)) is None


def test_without_minutes_each_part_has_its_own_deadline():
    assert Budget(None).deadline_s(Times(60, 30)) == 60


def test_a_part_can_be_run_in_ten_minutes_by_itself():
    for part in PARTS:
        assert part.times.least_s <= part.times.deadline_s <= 540, part.name
    assert len(BY_NAME) == len(PARTS)


def test_a_report_is_read_as_it_was_written(tmp_path):
    full = result(
        "decode",
        "failed",
        figures=[Figure("decode_roofline", "1b", 0.7)],
        tables=[Table("steps", ["a", "b"], [["1", "2"]])],
        notes=["a note"],
        plots=["decode.png"],
        last_lines=["the last line"],
    )
    written(tmp_path, full)
    assert Report.read(tmp_path).parts == {"decode": full}
    text = (tmp_path / "report.md").read_text()
    for words in ("| met |", "at least 0.6", "a note", "decode.png", "the last line", "its reason"):
        assert words in text
    assert "| Prefill | not run |" in text
    assert not list(tmp_path.glob("*.new"))


def test_parts_of_several_runs_make_one_report(tmp_path):
    first = written(tmp_path / "1", result("decode", plots=["decode.png"]), files=["decode.png"])
    second = written(tmp_path / "2", result("prefill", at_s=2.0), result("decode", "skipped"))
    report = merge([first, second], tmp_path / "all")
    assert [each.name for each in report.in_order()] == ["decode", "prefill"]
    assert report.parts["decode"].state == "passed"
    assert (tmp_path / "all" / "decode.png").read_bytes() == b"decode.png"
    assert Report.read(tmp_path / "all").parts == report.parts


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_part_that_ran_twice_the_newer_one_counts(tmp_path, order):
    folders = [
        written(tmp_path / "old", result("decode", "failed", at_s=1.0)),
        written(tmp_path / "new", result("decode", "passed", at_s=2.0)),
    ]
    report = merge([folders[number] for number in order], tmp_path / "all")
    assert report.parts["decode"].state == "passed"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_part_that_was_skipped_replaces_none_that_ran(tmp_path, order):
    folders = [
        written(tmp_path / "ran", result("decode", "failed", at_s=1.0)),
        written(tmp_path / "skipped", result("decode", "skipped", at_s=2.0)),
    ]
    report = merge([folders[number] for number in order], tmp_path / "all")
    assert report.parts["decode"].state == "failed"
    assert not report.is_good()


def test_sources_that_differ_are_said(tmp_path):
    other = Origin("commit b", "a GPU", "a command", is_rehearsal=False)
    written(tmp_path, result("decode"), result("prefill", origin=other))
    text = (tmp_path / "report.md").read_text()
    assert "different sources" in text
    assert "- decode: `a command`, commit a, on a GPU." in text


def test_a_rehearsal_is_not_mixed_with_a_run(tmp_path):
    written(tmp_path / "gpu", result("decode"))
    written(tmp_path / "none", result("prefill", origin=REHEARSAL))
    with pytest.raises(ReportError, match="rehearsal"):
        merge([tmp_path / "gpu", tmp_path / "none"], tmp_path / "all")


def test_what_is_no_report_is_refused(tmp_path):
    with pytest.raises(ReportError, match="no report"):
        merge([tmp_path], tmp_path / "all")
    for text in ("{", "[]", '{"format": 1}', '{"format": 1, "parts": [{"name": 1}]}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ReportError, match="is no report"):
            Report.read(tmp_path)
    (tmp_path / "report.json").write_text('{"format": 99, "parts": []}')
    with pytest.raises(ReportError, match="another format"):
        Report.read(tmp_path)


def test_a_plot_that_is_missing_is_said(tmp_path):
    written(tmp_path / "1", result("decode", plots=["decode.png"]))
    with pytest.raises(ReportError, match=r"lacks decode\.png"):
        merge([tmp_path / "1"], tmp_path / "all")


def test_a_record_is_whole_after_each_word(tmp_path):
    path = tmp_path / "result.json"
    record = Record(result("decode"), path)
    record.figure("decode_roofline", "1b", 0.5)
    record.table("steps", ["a"], [["1"]])
    record.table("steps", ["a"], [["1"], ["2"]])
    found = PartResult.from_json(json.loads(path.read_text()))
    assert found.figures == [Figure("decode_roofline", "1b", 0.5)]
    assert found.tables == [Table("steps", ["a"], [["1"], ["2"]])]


def test_the_exit_code_of_a_merge_says_whether_all_is_well(tmp_path, capsys):
    good = written(tmp_path / "1", result("decode", figures=[Figure("decode_roofline", "", 0.9)]))
    assert main(["--merge", str(good), "--out", str(tmp_path / "good")]) == 0
    bad = written(tmp_path / "2", result("prefill", figures=[Figure("prefill_rate", "", 0.1)]))
    assert main(["--merge", str(good), str(bad), "--out", str(tmp_path / "bad")]) == 1
    assert main(["--merge", str(tmp_path / "nowhere"), "--out", str(tmp_path / "no")]) == 2
    assert "there is no report" in capsys.readouterr().err
