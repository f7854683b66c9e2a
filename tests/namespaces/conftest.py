"""These tests start what users start: the kits of the end-to-end tests serve them, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
