"""Moves each shape with each engine, a memcpy of as many bytes before every transfer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from neuron_di.errors import NeuronDiError
from neuron_di.transfer_bench.flags import AUTO
from neuron_di.transfer_bench.local_end import local_serving_end
from neuron_di.transfer_bench.measuring_end import EXCHANGES, MeasuringEnd
from neuron_di.transfer_bench.plain_copy import PlainCopy
from neuron_di.transfer_bench.report import Figures, Samples, TransferReport
from neuron_di.transfer_bench.resources import REGION_BYTES_MAX, region_bytes
from neuron_di.transfer_bench.shape import Shape

WARM_UPS = 2  # the first of them is always verified
DEFAULT_SHAPES = ("64KiB", "64MiB", "4096x16KiB")
DEFAULT_REPEATS = 20
_NEED_ARENA = {AUTO, EXCHANGES}  # as for a worker: NIXL takes no pool that lies in one

Tell = Callable[[str], None]


def measure_on_this_host(
    engines: Sequence[str] = (AUTO,),
    shapes: Sequence[str] = DEFAULT_SHAPES,
    *,
    repeats: int = DEFAULT_REPEATS,
    verify: bool = False,
    pool_bytes: int | None = None,
    tell: Tell = lambda _: None,
) -> TransferReport:
    """Start a second process and measure between it and this one. Blocks.

    A pool has at least `pool_bytes`, which should be more than a cache; None: as fits here.
    Raises what an engine did not do: ConfigError where it cannot be opened here, a PeerError where
    it does not connect or move, KvCorrupt where other bytes arrived; the message names it.
    """
    parsed = [Shape.of(text) for text in shapes]
    with local_serving_end() as link:
        end = MeasuringEnd(link, has_arena=not _NEED_ARENA.isdisjoint(engines))
        try:
            return measure(
                end,
                engines,
                parsed,
                repeats=repeats,
                verify=verify,
                pool_bytes=region_bytes() if pool_bytes is None else pool_bytes,
                peer="a process of this host",
                tell=tell,
            )
        finally:
            end.close()


def measure(
    end: MeasuringEnd,
    engines: Sequence[str],
    shapes: Sequence[Shape],
    *,
    repeats: int,
    verify: bool,
    pool_bytes: int,
    peer: str,
    tell: Tell = lambda _: None,
) -> TransferReport:
    """The same, between `end` and the one it is linked to. Raises likewise."""
    figures: list[Figures] = []
    copy = PlainCopy(min(pool_bytes, REGION_BYTES_MAX))
    try:
        for shape in shapes:
            figures += _measure_shape(
                end, copy, pool_bytes, engines, shape, repeats=repeats, verify=verify, tell=tell
            )
    finally:
        copy.close()
    return TransferReport(peer=peer, repeats=repeats, figures=figures)


def _measure_shape(
    end: MeasuringEnd,
    copy: PlainCopy,
    pool_bytes: int,
    engines: Sequence[str],
    shape: Shape,
    *,
    repeats: int,
    verify: bool,
    tell: Tell,
) -> list[Figures]:
    tell(f"{shape}: set-up")
    end.open_pools(shape, pool_bytes)
    turns = [_Turns(end, copy, number, engine, shape) for number, engine in enumerate(engines)]
    for each in turns:
        each.set_up()
    for number in range(repeats):
        tell(f"{shape}: {number + 1} of {repeats}")
        for each in turns:
            each.take(verify=verify)
    figures = [each.figures() for each in turns]
    end.close_pools()
    return figures


class _Turns:
    """One engine's, with one shape."""

    def __init__(
        self, end: MeasuringEnd, copy: PlainCopy, number: int, engine: str, shape: Shape
    ) -> None:
        self._end = end
        self._copy = copy
        self._number = number
        self._engine = engine
        self._shape = shape
        self._samples = Samples()
        self._open_s = 0.0
        self._connect_s = 0.0

    def set_up(self) -> None:
        """Connect and warm up. What moves nothing, or wrong bytes, ends here."""
        with _naming(self._engine):
            set_up = self._end.connect(self._number, self._engine)
            self._open_s, self._connect_s = set_up.open_s, set_up.connect_s
            for number in range(WARM_UPS):
                self._end.move(self._number, self._shape.num_blocks, verify=number == 0)

    def take(self, *, verify: bool) -> None:
        copied_s: list[float] = []

        def copy() -> None:
            if verify:
                self._copy.evict()
            copied_s.append(self._copy.seconds(self._shape.num_bytes))

        with _naming(self._engine):
            moved = self._end.move(
                self._number, self._shape.num_blocks, verify=verify, just_before=copy
            )
        self._samples.add(moved, copied_s[0])

    def figures(self) -> Figures:
        lane = self._end.lane(self._number)
        return self._samples.figures(
            shape=str(self._shape),
            engine=lane.name,
            reason=lane.reason if self._engine == AUTO else "",
            num_bytes=self._shape.num_bytes,
            open_s=self._open_s,
            connect_s=self._connect_s,
        )


@contextmanager
def _naming(engine: str) -> Iterator[None]:
    """Say of whatever goes wrong which engine it was, and what kind of error."""
    try:
        yield
    except NeuronDiError as error:
        raise type(error)(f"{engine} does not work: {error.code}: {error.message}") from error
