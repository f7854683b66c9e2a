import argparse
from pathlib import Path

import pytest
from other_user import as_another_user

from neuron_di.bench.command import run_bench_command, settings_of
from neuron_di.bench.flags import add_bench_flags
from neuron_di.bench.lengths import Lengths
from neuron_di.config import FlagParser
from neuron_di.errors import ConfigError


def settings(*flags):
    parser = FlagParser(prog="bench")
    add_bench_flags(parser)
    return settings_of(parser.parse_args(["--url", "http://a", *flags]))


def test_defaults():
    found = settings()
    assert (found.loop, found.concurrency, found.requests, found.slices) == ("closed", 4, 100, 1)
    assert (found.temperature, found.ignore_eos, found.names) == (0, True, ("A",))


def test_the_preset_of_llmperf_is_the_settings_of_the_guides():
    found = settings("--preset", "llmperf")
    assert found.input_tokens == Lengths("fixed", 1024)
    assert found.output_tokens == Lengths("normal", 100, 10)
    assert (found.requests, found.concurrency, found.loop) == (200, 4, "closed")


def test_what_is_given_goes_before_a_preset():
    found = settings("--preset", "llmperf", "--input-tokens", "300", "--requests", "7")
    assert (found.input_tokens.first, found.requests, found.concurrency) == (300, 7, 4)


def test_another_load_replaces_a_presets_load_altogether():
    found = settings("--preset", "llmperf", "--rate", "3")
    assert (found.loop, found.rate, found.concurrency) == ("open", 3, None)
    found = settings("--preset", "vllm-random", "--concurrency", "3")
    assert (found.loop, found.rate, found.concurrency) == ("closed", None, 3)


def test_a_duration_replaces_a_presets_number():
    found = settings("--preset", "llmperf", "--duration-s", "9")
    assert (found.requests, found.duration_s) == (None, 9)


@pytest.mark.parametrize(
    ("flags", "loop"),
    [
        (["--rate", "2"], "open"),
        (["--rate", "2", "--concurrency", "9"], "open"),
        (["--trace", "x"], "trace"),
        (["--trace", "x", "--rate", "2"], "open"),
        (["--trace", "x", "--concurrency", "2"], "closed"),
    ],
)
def test_which_loop_it_is(flags, loop):
    assert settings(*flags).loop == loop


def test_a_trace_is_replayed_whole_and_in_a_presets_place():
    found = settings("--trace", "x", "--preset", "llmperf")
    assert (found.trace, found.requests, found.loop) == (Path("x"), None, "trace")


def test_several_endpoints():
    found = settings("--url", "http://b", "--name", "one", "--name", "two")
    assert (found.urls, found.names, found.slices) == (("http://a", "http://b"), ("one", "two"), 4)


@pytest.mark.parametrize(("num_requests", "num_slices"), [(1, 1), (3, 3), (4, 4), (50, 4)])
def test_few_requests_to_several_endpoints_are_few_slices(num_requests, num_slices):
    found = settings("--url", "http://b", "--requests", str(num_requests))
    assert found.slices == num_slices


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--concurrency", "0"], "--concurrency"),
        (["--requests", "-1"], "--requests"),
        (["--duration-s", "inf"], "--duration-s"),
        (["--rate", "inf", "--duration-s", "9"], "--requests"),
        (["--preset", "vllm-random", "--duration-s", "9"], "--requests"),
        (["--timeout-s", "0"], "--timeout-s"),
        (["--warmup", "-1"], "--warmup"),
        (["--seed", "-1"], "--seed"),
        (["--rate", "1", "--burstiness", "0"], "--burstiness"),
        (["--rate", "1", "--burstiness", "2"], "--arrivals burst"),
        (["--arrivals", "poisson"], "--rate"),
        (["--time-scale", "2"], "--trace"),
        (["--token-scale", "2"], "--trace"),
        (["--trace", "x", "--input-tokens", "9"], "--token-scale"),
        (["--trace", "x", "--rate", "1", "--time-scale", "2"], "--time-scale"),
        (["--slices", "9", "--requests", "3"], "--slices"),
        (["--name", "a", "--name", "b"], "--name"),
        (["--url", "http://b", "--name", "a", "--name", "a"], "--name"),
        (["--class-bounds", "9,3"], "--class-bounds"),
        (["--class-bounds", "9"], "--class-bounds"),
        (["--slo-itl-percent", "0"], "--slo-itl-percent"),
        (["--output-tokens", "x"], "--output-tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_flag(flags, words):
    with pytest.raises(ConfigError, match=words):
        settings(*flags)


def test_without_a_url():
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    with pytest.raises(ConfigError, match="--url"):
        settings_of(parser.parse_args([]))


@pytest.mark.parametrize("flag", ["--url=http://a", "--name=a", "--json=a", "--seed=0"])
def test_a_self_test_passes_over_no_flag(flag):
    parser = FlagParser(prog="bench")
    add_bench_flags(parser)
    with pytest.raises(ConfigError, match=rf"^{flag.split('=')[0]}: --self-test takes no other"):
        run_bench_command(parser.parse_args(["--self-test", flag]))


def test_help_lists_the_presets():
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    assert "llmperf: 1,024 tokens in, 100 ± 10 out" in " ".join(parser.format_help().split())


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_measured(tmp_path):
    parser = FlagParser(prog="bench")
    add_bench_flags(parser)
    flags = parser.parse_args(["--url", "http://127.0.0.1:1", "--plot", str(tmp_path / "a.xyz")])
    with pytest.raises(ConfigError, match=r"\.png, \.svg or \.pdf"):
        run_bench_command(flags)


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_what_cannot_be_written_is_said_before_anything_is_measured(flag, tmp_path):
    parser = FlagParser(prog="bench")
    add_bench_flags(parser)
    for path in (tmp_path / "absent" / "x", tmp_path):
        flags = parser.parse_args(["--url", "http://127.0.0.1:1", flag, str(path)])
        with pytest.raises(ConfigError, match="cannot be written"):
            run_bench_command(flags)


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_what_lies_where_this_user_may_not_look_cannot_be_written(flag, tmp_path):
    parser = FlagParser(prog="bench")
    add_bench_flags(parser)
    (tmp_path / "closed").mkdir(mode=0o600)
    path = str(tmp_path / "closed" / "x.png")
    flags = parser.parse_args(["--url", "http://127.0.0.1:1", flag, path])
    words = f"{path} cannot be written: Permission denied"
    with as_another_user(tmp_path), pytest.raises(ConfigError, match=words):
        run_bench_command(flags)
