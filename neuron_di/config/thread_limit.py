"""How many threads this process may have."""

import threading

from neuron_di.config.control_group import usable_cores
from neuron_di.errors import ConfigError

THREADS_MIN = 8  # that any process of ours starts before it serves anybody


def require_threads(*, computes: bool = False) -> None:
    """ConfigError where there cannot be as many threads as this process needs.

    Libraries that are refused one later abort the process without a word of ours. Who `computes`
    has a tokenizer, which starts one per core.
    """
    num = THREADS_MIN + (usable_cores() if computes else 0)
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(num):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise ConfigError(
            f"no more than {len(started)} further threads can be started here, and this process "
            f"needs at least {num}: raise the limit of processes and threads (ulimit -u, pids.max "
            "of a control group, --pids-limit of a container)"
        ) from None
    finally:
        over.set()
        for thread in started:
            thread.join()
