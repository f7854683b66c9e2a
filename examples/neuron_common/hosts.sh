# shellcheck shell=bash
# Which hosts there are, and which of them is this machine. ADDRESSES has them all, none for a
# tutorial on one host; the first one also has etcd and the proxy.

read_hosts() {
    local address before=,
    local byte='(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])'
    IFS=, read -r -a ADDRESSES <<<"$HOSTS"
    for address in "${ADDRESSES[@]}"; do
        [[ $address =~ ^$byte(\.$byte){3}$ ]] ||
            wrong_option "--hosts takes IP addresses, 10.1.0.11,10.1.0.12, and $address is none"
        [[ $before != *,$address,* ]] || wrong_option "--hosts has $address twice"
        before+=$address,
    done
    [ ${#ADDRESSES[@]} -ne 1 ] || wrong_option "--hosts takes two addresses or more"
    URL=http://${ADDRESSES[0]:-127.0.0.1}:$PROXY_PORT
}

has_several_hosts() { [ ${#ADDRESSES[@]} -gt 0 ]; }

# An address of this machine. A dry run shows what is done on all of them.
is_here() {
    [ -n "$IS_DRY" ] || python3 -c '
import socket, sys
try:
    socket.create_server((sys.argv[1], 0)).close()
except OSError:
    sys.exit(1)' "$1"
}

# Numbers of the hosts that are this machine: one, or all of them in a simulation.
hosts_here() {
    local index found=''
    for index in "${!ADDRESSES[@]}"; do
        is_here "${ADDRESSES[$index]}" || continue
        found+="$index "
    done
    [ -n "$found" ] ||
        missing "none of $HOSTS is an address of this machine" "look with: ip -brief address"
    echo "$found"
}

# Where orders are given: the proxy takes them there.
is_first_host() { ! has_several_hosts || is_here "${ADDRESSES[0]}"; }

# The key that step 4 made on the first host, for the commands that ask the proxy.
use_key() {
    # shellcheck disable=SC2034  # request.sh has it
    if has_several_hosts; then AUTHORIZATION=(-H "@$STATE/authorization"); else AUTHORIZATION=(); fi
    has_several_hosts || return 0
    if [ -n "$IS_DRY" ]; then
        say "\$ export KEY_NEURON_DI=\$(<$(word "$STATE/key"))"
    elif [ -s "$STATE/key" ]; then
        KEY_NEURON_DI=$(<"$STATE/key")
        export KEY_NEURON_DI
    fi
}

# by_hand ORDER…: how one types an order that the proxy is given.
by_hand() {
    # shellcheck disable=SC2016  # the reader's shell reads the key
    ! has_several_hosts || printf 'KEY_NEURON_DI=$(<%s) ' "$(word "$STATE/key")"
    printf 'neuron-di %s --url %s' "$*" "$URL"
}

# Only the first host's proxy can be asked, with the key that is there.
only_first_host() {
    is_first_host || missing "this is done on the first host" "run it on ${ADDRESSES[0]}"
    use_key
}

# The proxy answers that it has workers for both phases.
is_ready() { curl --silent --fail --max-time 5 "$URL/ready" >/dev/null 2>&1; }

is_served() { curl --silent --max-time 5 "$URL/live" >/dev/null 2>&1; }

need_ready() {
    # Who listens there may still wait for workers of other hosts; where nobody does, nobody will.
    [ -n "$IS_DRY" ] || { until_succeeds 10 is_served && until_succeeds 120 is_ready; } ||
        missing "nothing serves at $URL" "4-serve.sh, on every host; $(by_hand status)"
}
