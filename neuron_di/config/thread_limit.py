"""How many threads this process may have."""

import os
import threading

from neuron_di.config.control_group import usable_cores
from neuron_di.errors import ConfigError

THREADS_MIN = 8  # that any process of ours starts before it serves anybody


def require_threads(*, computes: bool = False) -> None:
    """ConfigError where there cannot be as many threads as this process needs.

    Libraries that are refused one later abort the process without a word of ours. Who `computes`
    has a tokenizer, too.
    """
    num = THREADS_MIN + (_tokenizer_threads() if computes else 0)
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


def _tokenizer_threads() -> int:
    """One per core, unless an operator told its library otherwise by that one's own variables."""
    parallel = os.environ.get("TOKENIZERS_PARALLELISM", "on").lower()
    if parallel in ("", "off", "false", "f", "no", "n", "0"):
        return 0
    said = os.environ.get("RAYON_NUM_THREADS", "")
    return (said.isdecimal() and int(said)) or usable_cores()
