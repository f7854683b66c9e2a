# shellcheck shell=bash
# What every step of a tutorial does first: options, settings, folders. A step sources it, and has
# then all functions of this folder:
#
#     . "$(dirname "$(readlink -f "$0")")/../neuron_common/begin.sh"
#
# FOLDER is the step's folder, whose settings.sh says what differs from instance to instance; ROOT
# the repository; STATE what the steps remember between them: process ids, logs, keys.

# shellcheck disable=SC2034  # what is set here is for the files sourced below, and for the steps
unset CDPATH
FOLDER=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
COMMON=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$COMMON/../.." && pwd)
IS_DRY=''
IS_SIMULATED=''
: "${HOSTS:=}"

# The step's leading comment, then the options that all steps have.
usage() {
    sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0"
    cat <<'EOF'

  --dry-run       print the commands and run none
  --simulate      do it here, on simulated NeuronCores, with the model that is shipped
  --hosts A,B     IP addresses of several hosts, the first one also for etcd and the proxy. Say the
                  same in every step, on every host; or export HOSTS=A,B. None: one host
  --state FOLDER  where the steps remember what runs (default: ~/.neuron-di/tutorial-INSTANCE,
                  with -simulated behind it for --simulate)

Settings stand in settings.sh, and in ../neuron_common/defaults.sh those that are the same on every
instance; a variable of the environment goes before: TP=8 ./4-serve.sh
EOF
}

wrong_option() {
    echo "$(basename "$0"): $1; --help shows what there is" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) IS_DRY=yes ;;
        --simulate) IS_SIMULATED=yes ;;
        --hosts | --state)
            [ $# -ge 2 ] || wrong_option "$1 needs a value"
            if [ "$1" = --hosts ]; then HOSTS=$2; else STATE=$2; fi
            shift
            ;;
        -h | --help) usage && exit 0 ;;
        *) wrong_option "unknown option $1" ;;
    esac
    shift
done

# A checkout's own environment will do, where none is active. Its folder of programs has the
# compiler, too, which is looked for by its bare name.
if ! command -v neuron-di >/dev/null && [ -x "$ROOT/.venv/bin/neuron-di" ]; then
    PATH=$ROOT/.venv/bin:$PATH
fi

[ -n "${STATE:-${HOME:-}}" ] || wrong_option "HOME is not set: say --state FOLDER"
: "${STATE:=$HOME/.neuron-di/tutorial-$(basename "$FOLDER")${IS_SIMULATED:+-simulated}}"

for part in commands settings_check processes hosts shape \
    launch install check serve request bench bench_hosts scale_out drain; do
    # shellcheck source=/dev/null  # each is checked by itself
    . "$COMMON/$part.sh"
done
# Values that are there already stay: so a simulation's go before an instance's.
# shellcheck source=/dev/null
[ -z "$IS_SIMULATED" ] || . "$COMMON/simulator.sh"
. "$COMMON/ports.sh"
# shellcheck source=/dev/null
. "$FOLDER/settings.sh"
. "$COMMON/defaults.sh"
read_hosts
check_settings
[ -n "$IS_DRY" ] || (umask 077 && mkdir -p "$STATE" && [ -w "$STATE" ]) ||
    wrong_option "nothing can be written to $STATE: say --state FOLDER"
[ -z "$IS_SIMULATED" ] || enter_simulation
