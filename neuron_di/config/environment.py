"""What the processes that we start inherit."""

import os

KEY_PREFIX = "KEY_NEURON_DI"


def child_environment() -> dict[str, str]:
    """Every variable but our own keys: an operator's, and whatever else begins like it.

    Options are no secrets: a password is given by the name of its file. Nobody can list what a
    device's runtime is set up by, so the rest stays.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(KEY_PREFIX)}
