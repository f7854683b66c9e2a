#!/usr/bin/env bash
# Step 8 of README.md: let workers finish what they have, end everything that the steps started
# here, and say what is left in AWS. On the first host first, then on the others.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
drain
