"""A short-lived process that takes NeuronCores and gives them back: could a worker have them?

A process may start the runtime once, and the one that serves leaves that to PyTorch. So this is
tried in another process, which may also die of it. Prints one line: a JSON object.

Run as a file, so that it starts without what a worker needs. The environment says which cores.
So far this has run on a simulator of libnrt only.
"""

import json
import sys
from typing import Any

from neuron_di_bindings.nrt import NrtError, NrtMissing, NrtRuntime, NrtUnsupported, load_nrt


def probe() -> dict[str, Any]:
    """What happened: "version" and "num_cores" as far as it came, "failed" where it stopped."""
    found: dict[str, Any] = {}
    try:
        runtime = NrtRuntime(load_nrt())
        runtime.init()
        try:
            found["num_cores"] = runtime.visible_cores()
        finally:
            runtime.close()
    except NrtError as error:
        found |= {"failed": str(error), "status": int(error.status)}
    except (NrtMissing, NrtUnsupported) as error:
        found["failed"] = str(error)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
