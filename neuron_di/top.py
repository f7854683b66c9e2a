"""`neuron-di top`: the workers and what they do, drawn again and again.

    proxy http://127.0.0.1:8000 serving
    12 running, 3 waiting                 1,310 tokens/s out, 4,096 in
    first token p50 41 ms, p99 120 ms     between tokens p50 9 ms, p99 22 ms

    worker     role     state   run  wait  moving  KV in use            KV in/s
    prefill-0  prefill  ready     1     0       2  [||||          37%]

Rates and times are of the last seconds. `moving`: requests whose KV is parked, or being received.
Where there is room, more comes behind that: to how many workers it has a connection (`peers`),
how long ago it started, by what its KV comes (`lanes`: "shm 2, tcp 1" from three workers), how many
requests it computes together, its model and its KV layout.
"""

import signal
from collections import Counter, deque
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from neuron_di.clock import now_s, sleep_s
from neuron_di.errors import ConfigError, PeerError, PeerGone, RemoteProtocolError
from neuron_di.proxy_answers import ask, ask_status
from neuron_di.status import (
    MODEL_CHARS_MAX,
    notes_of_workers,
    place_in_table,
    shown_duration,
)
from neuron_di.stop_signals import raising_on
from neuron_di.terminal_text import printable
from neuron_di.top_figures import Buckets, Look, quantile, rate, read_look
from neuron_di_proxy.partners import shown_digest
from neuron_di_proxy.status import WorkerReport

INTERVAL_S = 1.0
WINDOW_S = 10.0  # what rates and times are of
REFRESHES_PER_S = 4  # so that a terminal of another size is drawn anew at once
BAR_CHARS = 8
WIDE_CHARS = 76  # of a terminal that shows what each worker does
FULL_CHARS = 98  # and how it is connected
LANES_CHARS = 118  # and by what
VAST_CHARS = 150  # and what it is
LONG_CHARS = 162  # with a long model's name
LANES_CHARS_MAX = 18
NAME_CHARS_MAX = {True: 18, False: 16}  # of a worker; a longer one loses its middle
HALF_CHARS = 38  # of the lines above the table
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def show_top(url: str, *, key: str | None = None, once: bool = False) -> int:
    """Draw until Ctrl-C; with `once`, print one frame.

    A proxy that is not there is waited for, but not with `once`: PeerGone. Raises ConfigError
    where there is no terminal to draw on.
    """
    console = Console(highlight=False)
    view = View(url, key)
    if once:
        view.look()
        sleep_s(INTERVAL_S)
        view.look()
        console.print(view)
        return 0
    if not console.is_terminal or console.is_dumb_terminal:  # as Emacs' shell: nothing is drawn
        raise ConfigError("top draws on a terminal; --once prints one frame anywhere")
    view.look_if_there()  # a wrong key shows at once
    # A script's background job is born deaf to Ctrl-C, and this would then never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    live = Live(
        get_renderable=lambda: view,
        console=console,
        screen=True,
        refresh_per_second=REFRESHES_PER_S,
    )
    try:
        with raising_on(signal.SIGTERM), live:  # else the terminal would stay as it is drawn on
            while True:
                sleep_s(INTERVAL_S)
                view.look_if_there()
    except KeyboardInterrupt:
        return 0


class View:
    """What is known of a proxy, from the last `WINDOW_S` seconds."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._key = key
        self._looks: deque[Look] = deque()
        self._trouble = ""  # why the last look failed

    def look(self) -> None:
        """Ask the proxy. Raises what keeps it from answering."""
        status, _ = ask_status(self._url, self._key)
        metrics = ask(self._url, "/metrics", self._key)
        try:
            look = read_look(now_s(), status, metrics.decode())
        except ValueError as error:
            raise RemoteProtocolError(f"{self._url} is not a neuron-di proxy: {error}") from None
        looks = [*self._looks, look]
        while len(looks) > 2 and looks[1].at_s <= look.at_s - WINDOW_S:
            looks.pop(0)
        # At once, as another thread draws.
        self._looks, self._trouble = deque(looks), ""

    def look_if_there(self) -> None:
        """Ask the proxy; one that is not there is asked again next time."""
        try:
            self.look()
        except PeerGone as error:
            self._trouble = error.message
        except PeerError as error:
            if not self._looks:
                raise  # it never was a proxy
            self._trouble = error.message

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What is to be seen now, as wide as there is room."""
        looks, trouble = self._looks, self._trouble
        if trouble:
            yield Text(f"{trouble}; asking again", style="bold red")
        if not looks:
            return
        if trouble:
            yield Text("as it was last:", style="dim")
        is_wide = options.max_width >= WIDE_CHARS
        yield from _head(self._url, looks[0], looks[-1], is_wide=is_wide)
        yield Text()
        yield from _workers(looks[0], looks[-1], options.max_width)


def _head(url: str, before: Look, last: Look, *, is_wide: bool) -> Iterator[Text]:
    # Above the table: there may be more workers than lines.
    remarks = [Text(printable(words), style="yellow") for words in last.status.remarks]
    proxies = [last.status.proxy, *last.status.siblings]
    state = "draining" if last.status.proxy.is_draining else "serving"
    processes = f", {len(proxies)} processes" if len(proxies) > 1 else ""
    yield Text.assemble(("proxy ", "bold"), f"{url} {state}{processes}")
    yield from remarks
    num_running = sum(proxy.num_running for proxy in proxies)
    duration_s = last.at_s - before.at_s
    written = rate(before.num_answer_tokens, last.num_answer_tokens, duration_s)
    read = rate(before.num_prompt_tokens, last.num_prompt_tokens, duration_s)
    halves = (
        f"{num_running:,} running, {last.num_waiting:,.0f} waiting",
        f"{written:,.0f} tokens/s out, {read:,.0f} in",
        f"first token {_times(before.first_token, last.first_token)}",
        f"between tokens {_times(before.gap, last.gap)}",
    )
    if is_wide:
        yield Text(f"{halves[0]:{HALF_CHARS}}{halves[1]}")
        yield Text(f"{halves[2]:{HALF_CHARS}}{halves[3]}")
    else:
        yield from map(Text, halves)


def _times(before: Buckets, after: Buckets) -> str:
    median_s, slow_s = quantile(before, after, 0.5), quantile(before, after, 0.99)
    if median_s is None or slow_s is None:
        return "-"
    return f"p50 {_duration(median_s)}, p99 {_duration(slow_s)}"


def _workers(before: Look, last: Look, num_chars: int) -> Iterator[RenderableType]:
    workers = last.status.workers
    if not workers:
        yield Text("no worker is known")
    else:
        yield _table(before, last, num_chars)
    troubles = list(notes_of_workers(last.status))
    if troubles:
        yield Text()
        yield from (Text(words, style="yellow") for words in troubles)


def _table(before: Look, last: Look, num_chars: int) -> Table:
    """As many columns as there is room for."""
    is_wide, is_full = num_chars >= WIDE_CHARS, num_chars >= FULL_CHARS
    name_chars = NAME_CHARS_MAX[is_full or not is_wide]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("worker", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("role", "state") if is_wide else ("state",):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "moving") if is_wide else ("run", "wait"):
        table.add_column(name, no_wrap=True, justify="right")
    if is_wide:
        table.add_column("KV in use", no_wrap=True)
        table.add_column("KV in/s", no_wrap=True, justify="right")
    else:
        table.add_column("KV", no_wrap=True, justify="right")
    more = _more_names(num_chars)
    for name in more:
        is_number = name in ("peers", "age", "slots")
        table.add_column(name, no_wrap=True, justify="right" if is_number else "left")
    model_chars = MODEL_CHARS_MAX if num_chars >= LONG_CHARS else MODEL_CHARS_MAX // 2
    received = before.kv_bytes()
    duration_s = last.at_s - before.at_s
    for worker in sorted(last.status.workers, key=place_in_table):
        num_before = received.get(worker.record.incarnation, 0)
        cells = _cells(worker, num_before, duration_s, is_wide=is_wide)
        if not is_wide:
            cells = [cells[place] for place in (0, 2, 3, 4, 6)]
        cells[0] = _short(cells[0], name_chars)
        cells += _more_cells(worker, model_chars)[: len(more)]
        table.add_row(*map(Text, cells), style=_style(worker))
    return table


def _cells(
    worker: WorkerReport, kv_bytes_before: int, duration_s: float, *, is_wide: bool
) -> list[str]:
    """A worker's row, all of it."""
    record, status = worker.record, worker.status
    names = [printable(record.worker_id), record.role, worker.shown_state()]
    if status is None:
        return [*names, "", "", "", "", ""]
    num_used = status.num_blocks - status.num_blocks_free - status.num_blocks_cached
    part_used = num_used / max(1, status.num_blocks)
    in_rate = rate(kv_bytes_before, status.kv_bytes_received, duration_s)
    return [
        *names,
        str(status.num_running),
        str(status.num_waiting),
        str(status.num_transferring),
        _bar(part_used) if is_wide else f"{part_used:.0%}",
        _size(in_rate) if record.role == "decode" else "",
    ]


def _more_names(num_chars: int) -> tuple[str, ...]:
    """Of the columns that say more, those that there is room for."""
    names = ("peers", "age", "lanes", "slots", "model", "layout")
    num_shown = {FULL_CHARS: 2, LANES_CHARS: 3, VAST_CHARS: 6}
    return names[: max((n for chars, n in num_shown.items() if num_chars >= chars), default=0)]


def _more_cells(worker: WorkerReport, model_chars: int) -> list[str]:
    """What a row says of the worker itself."""
    record = worker.record if worker.status is None else worker.status.record
    age = "" if worker.age_s is None else shown_duration(worker.age_s)
    model = _short(printable(record.model.rpartition("/")[2]), model_chars)
    layout = printable(shown_digest(record.layout_digest))
    return [str(len(record.connections)), age, _lanes(worker), str(record.slots), model, layout]


def _lanes(worker: WorkerReport) -> str:
    """How many peers' KV comes by which engine. Empty for those that receive none."""
    lanes = worker.status.lanes if worker.status is not None else ()
    counts = Counter(lane.engine for lane in lanes).most_common()
    words = printable(", ".join(f"{name} {n}" for name, n in counts))
    return words if len(words) <= LANES_CHARS_MAX else f"{words[: LANES_CHARS_MAX - 1]}…"


def _short(name: str, num_chars: int) -> str:
    half = num_chars // 2
    return name if len(name) <= num_chars else f"{name[: half - 1]}…{name[-half:]}"


def _style(worker: WorkerReport) -> str:
    if worker.is_shunned or worker.status is None:
        return "red"
    if worker.health == "vanished" or worker.why_alone:
        return "yellow"
    return "" if worker.status.record.state == "ready" else "dim"


def _bar(part: float) -> str:
    num = round(part * BAR_CHARS)
    return f"[{'|' * num}{' ' * (BAR_CHARS - num)} {part:4.0%}]"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s"


def _size(num_bytes: float) -> str:
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}" if num_bytes else "0 B"
