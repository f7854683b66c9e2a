"""A run's figures, as written with --json. Times are in ms, `…_s` in seconds, rates per second."""

import msgspec

from neuron_di.bench.statistics import Summary

FORMAT = 1

Curve = list[list[float]]  # pairs of percent and ms


class Failures(msgspec.Struct, frozen=True):
    """Requests that failed in one way. `example` has the first one's words."""

    num: int
    example: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests that ended. Times are of those that are ok; None where there are none."""

    num_ok: int
    num_failed: int
    num_good: int
    ttft_ms: Summary | None
    itl_ms: Summary | None
    tpot_ms: Summary | None
    e2e_ms: Summary | None

    @property
    def num(self) -> int:
        return self.num_ok + self.num_failed


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of `least` to below `below` tokens; None: without end."""

    name: str
    least: int
    below: int | None
    figures: Figures


class SliceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A slice's turn. It began `begin_s` after the run did."""

    index: int
    begin_s: float
    wall_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    figures: Figures


class RequestColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Each request, in the order in which they ended. Times are seconds since the run began."""

    index: list[int]
    ending: list[str]
    prompt_tokens: list[int]
    output_tokens: list[int]
    intended_s: list[float]
    sent_s: list[float]
    ttft_ms: list[float | None]
    e2e_ms: list[float | None]
    is_good: list[bool]


class EndpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint. Times of an open loop count from when a request was to be sent; those
    `…_from_sent_ms` from when it was."""

    name: str
    url: str
    model: str
    tokens_by: str
    prompts_of: str
    notes: list[str]
    wall_s: float
    most_open: int
    num_interrupted: int
    num_reconnects: int
    failures: dict[str, Failures]
    figures: Figures
    ttft_from_sent_ms: Summary | None
    e2e_from_sent_ms: Summary | None
    lag_ms: Summary | None
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float
    classes: list[ClassReport]
    slices: list[SliceReport]
    ttft_curve: Curve
    itl_curve: Curve
    requests: RequestColumns


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of one endpoint over the first one's, slice by slice."""

    figure: str
    name: str
    over: str
    by_slice: list[float | None]
    median: float
    least: float
    most: float
    more_is_better: bool


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """What measuring cost. `cpu_share` is of one core."""

    cpu_share: float
    stall_ms_max: float
    warnings: list[str]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    format: int
    neuron_di: str
    started: str
    is_interrupted: bool
    loop: str
    load: str  # in words
    lengths: str  # in words
    slo: str  # in words, empty without one
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    settings: dict[str, str | int | float | bool | list[str] | None]
    num_left_out: int
    client: ClientReport
    endpoints: list[EndpointReport]
    ratios: list[Ratio]


def to_json(document: Document) -> bytes:
    """As one line of JSON per level of what people look at first."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def from_json(text: bytes) -> Document:
    """Raises msgspec.ValidationError when it is none, or msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Document)
