"""These tests start what users start: the kits of the end-to-end tests serve them, too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
pytest.register_assert_rewrite("asking_kit", "hosts_kit", "openai_kit", "process_kit")
