"""Moves each shape with each engine, a plain copy of as many bytes before every transfer."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from neuron_di.config import TransferOptions
from neuron_di.errors import NeuronDiError
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer_bench.device_copy import DeviceCopy
from neuron_di.transfer_bench.flags import AUTO
from neuron_di.transfer_bench.local_end import local_serving_end
from neuron_di.transfer_bench.make_pool import PoolKind
from neuron_di.transfer_bench.measuring_end import EXCHANGES, MeasuringEnd
from neuron_di.transfer_bench.plain_copy import PlainCopy, RegionCopy
from neuron_di.transfer_bench.report import Failure, Figures, Samples, TransferReport
from neuron_di.transfer_bench.resources import REGION_BYTES_MAX, region_bytes, require_room
from neuron_di.transfer_bench.shape import Shape

WARM_UPS = 2  # the first of them is always verified
DEFAULT_SHAPES = ("64KiB", "64MiB", "4096x16KiB")
DEFAULT_REPEATS = 20
_NEED_ARENA = {AUTO, EXCHANGES}  # as for a worker
_TAKE_NO_ARENA = {"nixl"}
_ON_DEVICE = {"cuda_ipc"}

Tell = Callable[[str], None]
_Found = dict[int, Figures | Failure]  # by the engine's number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    repeats: int
    verify: bool
    pool_bytes: int
    tell: Tell


def measure_on_this_host(
    engines: Sequence[str] = (AUTO,),
    shapes: Sequence[str] = DEFAULT_SHAPES,
    *,
    repeats: int = DEFAULT_REPEATS,
    verify: bool = False,
    pool_bytes: int | None = None,
    options: TransferOptions = TransferOptions(),  # noqa: B008 - nothing changes it
    tell: Tell = lambda _: None,
) -> TransferReport:
    """Start a second process and measure between it and this one. Blocks.

    A pool has at least `pool_bytes`, which should be more than a cache; None: as fits here.
    Raises and returns as `measure`, and PeerError where the second process does not start.
    """
    parsed = [Shape.of(text) for text in shapes]
    pool_bytes = region_bytes() if pool_bytes is None else pool_bytes
    with local_serving_end(options) as link:
        end = MeasuringEnd(link, has_arena=True, options=options)
        try:
            return measure(
                end,
                engines,
                parsed,
                repeats=repeats,
                verify=verify,
                pool_bytes=pool_bytes,
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
    """The same, between `end` and the one it is linked to.

    An engine that cannot be opened, does not connect or move, or brings other bytes is among the
    report's failures; the others have their figures. ConfigError where a pool has no room here.
    """
    wanted = _Wanted(repeats=repeats, verify=verify, pool_bytes=pool_bytes, tell=tell)
    groups = _grouped(engines, has_arena=end.has_arena)
    if any(kind != "device" for kind in groups):
        for shape in shapes:
            require_room(shape.pool_bytes(pool_bytes))
    figures: list[Figures] = []
    failures: list[Failure] = []
    with ExitStack() as stack:
        on_host = None
        if any(kind != "device" for kind in groups):
            on_host = stack.enter_context(closing(PlainCopy(min(pool_bytes, REGION_BYTES_MAX))))
        for shape in shapes:
            found: _Found = {}
            for kind, group in groups.items():
                found |= _measure_group(end, on_host, kind, group, shape, wanted)
            for _, each in sorted(found.items()):
                if isinstance(each, Failure):
                    failures.append(each)
                else:
                    figures.append(each)
    return TransferReport(peer=peer, repeats=repeats, figures=figures, failures=failures)


def _grouped(engines: Sequence[str], *, has_arena: bool) -> dict[PoolKind, dict[int, str]]:
    """Engines by the pools that they can have in common, each with its number."""
    has_arena = has_arena and not _NEED_ARENA.isdisjoint(engines)
    groups: dict[PoolKind, dict[int, str]] = {}
    for number, engine in enumerate(engines):
        kind: PoolKind = "arena" if has_arena and engine not in _TAKE_NO_ARENA else "host"
        if engine in _ON_DEVICE:
            kind = "device"
        groups.setdefault(kind, {})[number] = engine
    return groups


def _measure_group(
    end: MeasuringEnd,
    on_host: PlainCopy | None,
    kind: PoolKind,
    group: dict[int, str],
    shape: Shape,
    wanted: _Wanted,
) -> _Found:
    """Engines that take turns. Without one that fails, the others begin again on other pools.

    What it left unfinished may still write to the first ones, or own some of their blocks.
    """
    found: _Found = {}
    left = dict(group)
    while left:
        try:
            if end.lost is not None:
                raise end.lost
            with ExitStack() as stack:
                wanted.tell(f"{shape}: set-up")
                end.open_pools(shape, wanted.pool_bytes, kind)
                copy: RegionCopy | None = on_host
                if isinstance(end.pool, DevicePool):
                    num_bytes = min(wanted.pool_bytes, REGION_BYTES_MAX)
                    copy = stack.enter_context(closing(DeviceCopy(end.pool, num_bytes)))
                assert copy is not None, "there is one for each kind"
                return found | _take_turns(end, copy, left, shape, wanted)
        except _TurnFailed as failed:
            found[failed.number] = Failure.of(str(shape), left.pop(failed.number), failed.error)
        except NeuronDiError as error:  # of the pools
            return found | {
                number: Failure.of(str(shape), engine, error) for number, engine in left.items()
            }
    return found


def _take_turns(
    end: MeasuringEnd, copy: RegionCopy, engines: dict[int, str], shape: Shape, wanted: _Wanted
) -> _Found:
    turns = [_Turns(end, copy, number, engine, shape) for number, engine in engines.items()]
    for each in turns:
        each.set_up()
    for number in range(wanted.repeats):
        wanted.tell(f"{shape}: {number + 1} of {wanted.repeats}")
        for each in turns:
            each.take(verify=wanted.verify)
    return {each.number: each.figures() for each in turns}


class _TurnFailed(Exception):
    """Of one engine: which one it was, and what it ended with."""

    def __init__(self, number: int, error: NeuronDiError) -> None:
        super().__init__(error.message)
        self.number = number
        self.error = error


class _Turns:
    """One engine's, with one shape."""

    def __init__(
        self, end: MeasuringEnd, copy: RegionCopy, number: int, engine: str, shape: Shape
    ) -> None:
        self.number = number
        self._end = end
        self._copy = copy
        self._engine = engine
        self._shape = shape
        self._samples = Samples()
        self._open_s = 0.0
        self._connect_s = 0.0

    def set_up(self) -> None:
        """Connect and warm up. What moves nothing, or wrong bytes, ends here, as _TurnFailed."""
        try:
            set_up = self._end.connect(self.number, self._engine)
            self._open_s, self._connect_s = set_up.open_s, set_up.connect_s
            for number in range(WARM_UPS):
                self._end.move(self.number, self._shape.num_blocks, verify=number == 0)
        except NeuronDiError as error:
            raise _TurnFailed(self.number, error) from error

    def take(self, *, verify: bool) -> None:
        """One transfer. _TurnFailed with what it ended with."""
        copied_s: list[float] = []

        def copy() -> None:
            if verify:
                self._copy.evict()
            copied_s.append(self._copy.seconds(self._shape.num_bytes))

        try:
            moved = self._end.move(
                self.number, self._shape.num_blocks, verify=verify, just_before=copy
            )
        except NeuronDiError as error:
            raise _TurnFailed(self.number, error) from error
        self._samples.add(moved, copied_s[0])

    def figures(self) -> Figures:
        lane = self._end.lane(self.number)
        return self._samples.figures(
            shape=str(self._shape),
            engine=lane.name,
            reason=lane.reason if self._engine == AUTO else "",
            num_bytes=self._shape.num_bytes,
            open_s=self._open_s,
            connect_s=self._connect_s,
        )
