"""The benchmarks are no installed package: they run from the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
