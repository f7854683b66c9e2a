"""What verifying costs, of real workers: the benchmark's own command, with little to do."""

import json
import sys

from benchmarks import verification


def test_each_request_has_its_time_and_its_bytes(tmp_path, monkeypatch):
    words = ["--models", "25m", "--rounds", "2", "--prompt-tokens", "20", "40"]
    monkeypatch.setattr(sys, "argv", ["verification", *words, "--results", str(tmp_path)])
    monkeypatch.setattr(verification, "PROMISED_SHARE", 1.0)  # how long it takes is not asked here
    assert verification.main() == 0
    short, long = json.loads((tmp_path / "verification.json").read_text())
    assert [each["prompt_tokens"] for each in (short, long)] == [20, 40]
    assert [len(each["samples"]) for each in (short, long)] == [2, 2]
    for sample in short["samples"] + long["samples"]:
        assert 0 < sample["digest_s"] < sample["ttft_s"]
        assert 0 < sample["verify_s"] < sample["ttft_s"]
    (short_bytes,), (long_bytes,) = (
        {sample["kv_bytes"] for sample in each["samples"]} for each in (short, long)
    )
    assert long_bytes * 2 == short_bytes * 3  # two blocks, and three
    assert "of TTFT" in (tmp_path / "verification.md").read_text()
    assert (tmp_path / "verification.png").stat().st_size > 0
