#!/usr/bin/env bash
# Step 2 of README.md: look for what is wrong with this host, and how to mend it. On every host.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
check
