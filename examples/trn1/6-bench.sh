#!/usr/bin/env bash
# Step 6 of README.md: measure prefill and decode workers beside one worker that does both. On the
# first host. With several hosts: measure what they serve.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
bench
