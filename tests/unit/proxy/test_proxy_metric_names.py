"""`/metrics`, docs/metrics.md and the Grafana dashboard name the same metrics."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_worker import make_record

from neuron_di_proxy.health_report import HealthReport
from neuron_di_proxy.metrics import Metrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
NAME = re.compile(r"\b(?:vllm:|neuron_di_)\w+")


class OneWorker:
    def num_running(self):
        return 0

    def num_waiting(self):
        return 0

    def retry_budget(self):
        return 100.0

    def health_reports(self):
        return [HealthReport(make_record("p1", "prefill"), "up", "")]

    def pair_results(self):
        return []

    def candid_directory(self):
        return None


@pytest.fixture(scope="module")
def families():
    """Each metric's type by the name that it is asked for by."""
    text = Metrics(OneWorker()).text().decode()
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in text_string_to_metric_families(text)
    }


@pytest.fixture(scope="module")
def board():
    return json.loads((DOCS / "grafana" / "neuron-di.json").read_text(encoding="utf-8"))


def test_the_page_lists_every_metric_with_its_type(families):
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\S+)` \| (\w+) \|", page, re.MULTILINE)
    assert dict(listed) == families
    assert len(listed) == len(families)


def test_the_dashboard_asks_for_what_there_is(families, board):
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    series = {name + suffix for name, kind in families.items() for suffix in suffixes[kind]}
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", [])
        for name in NAME.findall(target["expr"])
    }
    assert asked <= series
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert set(NAME.findall(variables["model"]["definition"])) <= series
    # What the field asks for at a glance.
    assert asked >= {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "neuron_di_transfer_seconds_bucket",
        "neuron_di_transfer_failures_total",
        "neuron_di_worker_kv_bytes_received_total",
        "neuron_di_attempts_total",
        "neuron_di_continued_total",
        "neuron_di_requests_total",
    }


def test_the_dashboards_panels_are_whole_and_do_not_overlap(board):
    assert board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))
        for target in panel["targets"]:
            expr = target["expr"]
            for opening, closing in ("()", "[]", "{}"):
                assert expr.count(opening) == expr.count(closing), expr
            assert target["datasource"]["uid"] == "${datasource}"


def test_a_series_never_seen_is_no_name(families):
    """The parser sees families without samples: else the tests above would check nothing."""
    assert families["neuron_di_continued_total"] == "counter"
    assert families["neuron_di_transfer_seconds"] == "histogram"
