"""What neuron-di needs beside torch, a line each: the Containerfile installs that.

torch is left out because AWS's images have the one that torch-neuronx was built for, and nothing
may replace it; a proxy needs none. Arguments are extras, such as etcd. Run where pyproject.toml is.
"""

import re
import sys
import tomllib
from pathlib import Path

LEFT_OUT = {"torch"}


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Of the project and these extras. KeyError for an extra that it does not have."""
    project = tomllib.loads(pyproject)["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return [line for line in found if re.split(r"[^A-Za-z0-9_-]", line)[0] not in LEFT_OUT]


if __name__ == "__main__":
    print(*requirements(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1:]), sep="\n")
