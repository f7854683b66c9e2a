import argparse
import os
from pathlib import Path

import pytest

from benchmarks.provenance import choose_cores, command_line, machine_description


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["25m", "125m"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--vllm-python", type=Path)
    return parser


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([], "python -m bench"),
        (["--rounds", "5"], "python -m bench"),
        (["--models", "25m", "--rounds", "2"], "python -m bench --rounds 2 --models 25m"),
        (["--profile"], "python -m bench --profile"),
    ],
)
def test_the_command_shows_what_is_not_default(parser, given, shown):
    assert command_line("bench", parser.parse_args(given), parser.parse_args([])) == shown


def test_the_command_shows_no_path(parser):
    options = parser.parse_args(["--vllm-python", "/opt/me/venv/bin/python"])
    shown = command_line("bench", options, parser.parse_args([]))
    assert shown == "python -m bench --vllm-python PATH"


def test_the_machine_is_described_by_what_decides_speed():
    described = machine_description()
    assert f"{len(os.sched_getaffinity(0))} cores" in described
    assert "torch " in described


def test_the_last_cores_are_chosen():
    assert choose_cores(2, {0, 3, 5}) == {3, 5}


@pytest.mark.parametrize("num_cores", [0, 3])
def test_cores_that_are_not_there_are_refused(num_cores):
    with pytest.raises(ValueError, match="cores were asked for"):
        choose_cores(num_cores, {0, 1})
