"""What holds for every test: no hub, and processes that run as the tests themselves run."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
if sys.flags.optimize:  # python -O -m pytest: the processes that tests start drop asserts, too
    os.environ["PYTHONOPTIMIZE"] = str(sys.flags.optimize)
