"""A thread that makes one transfer whenever it is told to."""

import queue
import threading
from collections.abc import Callable

TIMEOUT_S = 60.0


class Companion:
    """`begin`, and later `wait`, by turns. Owns its thread until `end`."""

    def __init__(self, move: Callable[[], object]) -> None:
        self._move = move
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._orders.put(True)

    def wait(self) -> None:
        """Until it is done. Raises what it ended with; queue.Empty after a minute."""
        error = self._answers.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error

    def end(self) -> None:
        self._orders.put(False)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while self._orders.get():
            try:
                self._move()
            except Exception as error:
                self._answers.put(error)
            else:
                self._answers.put(None)
