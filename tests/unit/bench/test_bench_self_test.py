"""The client against the stub endpoint in another process: what it notes is what was sent."""

import asyncio
import io

from rich.console import Console

from neuron_di.bench.progress import RunProgress
from neuron_di.bench.run import View, bench
from neuron_di.bench.self_test import measure, running_stub
from neuron_di.bench.settings import make_settings


def test_the_client_counts_what_was_sent():
    with running_stub(20, 0.0) as url:
        run = measure(url, 20, concurrency=8, requests=40)
    columns = run.measured[0].columns()
    assert run.measured[0].counts == {"ok": 40}
    assert set(columns.output_tokens) == set(columns.num_chunks) == {20}
    assert len(columns.gaps_s) == 40 * 19
    assert run.turns[0].most_open == 8
    assert sorted(columns.index) == list(range(40))


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    monkeypatch.setattr("neuron_di.bench.progress.LINE_INTERVAL_S", 0.01)
    monkeypatch.setattr("neuron_di.bench.progress.DRAW_INTERVAL_S", 0.01)

    def shown(is_terminal):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, markup=False)
        view = View()

        async def main():
            settings = make_settings({"urls": (url,), "requests": 30, "input_tokens": "16",
                                      "output_tokens": "10", "names": ("[/x]",)})  # fmt: skip
            async with RunProgress(console, view):
                await bench(settings, None, None, view)

        asyncio.run(main())
        return console.file.getvalue()

    with running_stub(10, 5.0) as url:
        plain, drawn = shown(False), shown(True)
    assert "\x1b" not in plain
    assert "/30 over" in plain
    assert "\x1b" in drawn
    assert "/30 over" in drawn
    assert "[/x]" in drawn  # a name is no markup
