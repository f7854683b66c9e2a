#!/usr/bin/env bash
# Step 7 of README.md: one more decode worker, while requests run. On every host, on
# the first one last: it shows that the worker is there.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
scale_out
