#!/usr/bin/env bash
# Step 6 of README.md: measure prefill and decode workers beside workers that do both, on as many
# cores. On every host, on the first one last: it measures.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
bench
