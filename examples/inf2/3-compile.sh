#!/usr/bin/env bash
# Step 3 of README.md: compile the model, once for each shape, on every host. What was compiled
# before is found again.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
need_neuron_di
compile_model "$TP"
