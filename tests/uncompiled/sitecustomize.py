"""With this folder on PYTHONPATH no process finds what is compiled for KV, as if it were not built.

Python imports this module by its name when it starts.
"""

import sys

for _name in ("_kv_copy", "_owner_words"):
    sys.modules[f"neuron_di_bindings.{_name}"] = None  # type: ignore[assignment]
