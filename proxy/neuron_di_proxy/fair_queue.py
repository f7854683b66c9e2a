"""Who is next: start-time fair queueing between flows, first come first served within one.

A flow's next item starts, in virtual time, where its last one ended, or now if that is later; it
ends `cost / weight` after its start. The item that starts first is next, and the virtual time is
the latest start so far. So flows that wait share in proportion to their weights, whatever one of
them piles up, and a flow that was away gets no credit for it.

P. Goyal, H. Vin, H. Cheng: Start-time Fair Queuing, SIGCOMM 1996.
"""

import heapq
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

_FLOWS_KEPT = 1024  # ends of flows that are looked through for what is over, when there are more


class _Flow(Generic[T]):
    """One flow's items that wait, in the order they came, each with `cost / weight`."""

    __slots__ = ("is_listed", "items")

    def __init__(self) -> None:
        self.items: dict[T, float] = {}
        self.is_listed = False  # the heap has its one entry


class FairQueue(Generic[T]):
    """Items by flow. `put`, `take_first` and `remove` take a time that grows with the number of
    flows that wait as its logarithm."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}  # that have an item, or an entry in the heap
        self._heap: list[tuple[float, int, str]] = []  # (start of the first item, order, flow)
        self._order = count()
        self._ends: dict[str, float] = {}  # where each flow's last item ended, if that is ahead
        self._virtual = 0.0
        self.num_items = 0  # that wait

    def __len__(self) -> int:
        return self.num_items

    def put(self, flow: str, item: T, cost: float, weight: float) -> None:
        """Let the item wait. It must not wait already; `cost` and `weight` are above 0."""
        found = self._flows.get(flow)
        if found is None:
            found = self._flows[flow] = _Flow()
        found.items[item] = cost / weight
        self.num_items += 1
        if not found.is_listed:
            self._list(flow, found)

    def pass_by(self, flow: str, cost: float, weight: float) -> None:
        """Count an item that need not wait, as if it had been put and taken at once."""
        start = self._ends.get(flow, 0.0)
        if start < self._virtual:
            start = self._virtual
        self._start(flow, start, cost / weight)

    def first(self) -> T | None:
        """The item that is next. None: none waits."""
        while self._heap:
            _, _, flow = self._heap[0]
            items = self._flows[flow].items
            if items:
                return next(iter(items))
            heapq.heappop(self._heap)  # all of its items were removed
            del self._flows[flow]
        return None

    def take_first(self) -> T:
        """Take the item that is next. There must be one."""
        item = self.first()
        assert item is not None, "nothing waits"
        start, _, flow = heapq.heappop(self._heap)
        found = self._flows[flow]
        found.is_listed = False
        self._start(flow, start, found.items.pop(item))
        self.num_items -= 1
        if found.items:
            self._list(flow, found)
        else:
            del self._flows[flow]
        return item

    def remove(self, flow: str, item: T) -> None:
        """Take out an item that waits, as if it had never come."""
        del self._flows[flow].items[item]
        self.num_items -= 1

    def _list(self, flow: str, found: _Flow[T]) -> None:
        start = max(self._virtual, self._ends.get(flow, 0.0))
        heapq.heappush(self._heap, (start, next(self._order), flow))
        found.is_listed = True

    def _start(self, flow: str, start: float, duration: float) -> None:
        if start > self._virtual:
            self._virtual = start
        self._ends[flow] = start + duration
        if len(self._ends) > _FLOWS_KEPT:
            ahead = {name: end for name, end in self._ends.items() if end > self._virtual}
            self._ends = ahead
