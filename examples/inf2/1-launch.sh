#!/usr/bin/env bash
# Step 1 of README.md: launch instances with all their EFA interfaces. Costs money until step 8 is
# followed to its end. Needs aws, REGION, SUBNET and KEY_NAME; --simulate shows the commands only.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
launch
