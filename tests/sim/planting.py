"""How a bug is planted: what it takes away, until the context ends."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

Plant = Callable[[], AbstractContextManager[object]]


def nothing(*_: object, **__: object) -> None:
    """What a forgotten call does."""


def instead(owner: object, name: str, other: object) -> Plant:
    return lambda: mock.patch.object(owner, name, other)


def without(table: dict, row: tuple, action: object) -> Plant:
    """A row of a table forgets one of its actions."""

    def plant() -> AbstractContextManager[object]:
        step = table[row]
        assert action in step.actions
        kept = tuple(each for each in step.actions if each is not action)
        return mock.patch.dict(table, {row: step._replace(actions=kept)})

    return plant


def row(table: dict, row: tuple, step: object) -> Plant:
    return lambda: mock.patch.dict(table, {row: step})


def both(one: Plant, other: Plant) -> Plant:
    @contextmanager
    def plant() -> Iterator[None]:
        with one(), other():
            yield

    return plant


def around(owner: object, name: str, other: Callable) -> Plant:
    """Put `other` in the place of a method; it is given the real one first."""

    def plant() -> AbstractContextManager[object]:
        real = getattr(owner, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            return other(real, *args, **kwargs)

        return mock.patch.object(owner, name, wrapped)

    return plant
