#!/usr/bin/env bash
# Between steps 1 and 2 of README.md: install neuron-di beside what AWS's image has. On every host.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
install
