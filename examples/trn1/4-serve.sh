#!/usr/bin/env bash
# Step 4 of README.md: start what serves on this host, and wait until it is ready. On every host.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
serve
