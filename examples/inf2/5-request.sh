#!/usr/bin/env bash
# Step 5 of README.md: ask for two answers, and see which way the KV went. On the first host.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
request
