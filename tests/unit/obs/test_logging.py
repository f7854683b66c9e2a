import json
import logging
import re
import shlex

import pytest

from neuron_di.obs import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_root():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def start(capsys):
    def start_logging(level="info", log_format="text"):
        setup_logging("prefill-0", level, log_format)
        return lambda: capsys.readouterr().err.splitlines()

    return start_logging


def test_a_line_has_time_level_process_and_the_event_first_of_its_fields(start):
    lines = start()
    get_logger("neuron_di.test").warning("lease_lost", key="/workers/x", num=3, ratio=0.5)
    (line,) = lines()
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=warning process=prefill-0 "
        r"event=lease_lost key=/workers/x num=3 ratio=0\.5",
        line,
    )


def test_json_lines(start):
    lines = start(log_format="json")
    get_logger("neuron_di.test").info("pulled", kv_bytes=7, peer="a b", blocks=(1, 2))
    line = json.loads(lines()[0])
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "process": "prefill-0",
        "event": "pulled",
        "kv_bytes": 7,
        "peer": "a b",
        "blocks": [1, 2],
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_value_cannot_forge_a_line_or_a_field(start, log_format):
    lines = start(log_format=log_format)
    reason = 'x\nlevel=error event="all lost"\r\u2028\x1b[31m'
    get_logger("neuron_di.test").info("refused", reason=reason, empty="", equals="a=b")
    (line,) = lines()
    assert line.isascii()
    assert line.isprintable()
    if log_format == "json":
        assert json.loads(line)["reason"] == reason
    else:
        names = [part.split("=", 1)[0] for part in shlex.split(line)]
        assert names == ["time", "level", "process", "event", "reason", "empty", "equals"]


def test_levels(start):
    lines = start("warning")
    log = get_logger("neuron_di.test")
    for emit in (log.debug, log.info, log.warning, log.error):
        emit("it")
    assert [re.search(r"level=(\w+)", line)[1] for line in lines()] == ["warning", "error"]


def test_an_exception_keeps_its_traceback_on_the_line(start):
    lines = start()
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        get_logger("neuron_di.test").exception("step_failed", request="r1")
    (line,) = lines()
    assert "event=step_failed request=r1 traceback=" in line
    assert line.endswith('ValueError"')


def test_lines_of_other_libraries_are_kept_in_form(start):
    lines = start()
    logging.getLogger("hypercorn.error").info("Running on %s\n(now)", "http://x")
    (line,) = lines()
    assert line.endswith(r'event=log logger=hypercorn.error message="Running on http://x\n(now)"')


def test_setting_up_again_replaces(start):
    start()
    lines = start()
    get_logger("neuron_di.test").info("once")
    assert len(lines()) == 1
