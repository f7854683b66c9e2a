#!/bin/sh
# Users of etcd who may do no more than they need, known by the CN of their certificates: workers
# read and write their own prefix, proxies read it, nobody else sees it.
#
#     make_users.sh FOLDER ENDPOINT[,ENDPOINT...] [PREFIX]
#
# FOLDER is that of make_certificates.sh, PREFIX what --etcd-prefix says (/neuron-di). Run once for
# each prefix: what is there already is kept.
set -eu

if [ $# -lt 2 ]; then
    sed -n '5s/^# *//p' "$0" >&2
    exit 2
fi
if ! command -v etcdctl >/dev/null; then
    echo "the program etcdctl is not here: sudo apt-get install etcd-client" >&2
    exit 2
fi
folder=$1
endpoints=$2
prefix=${3:-/neuron-di}
case $prefix in
/*) ;;
*) echo "$prefix is no PREFIX: it begins with a slash, as in /neuron-di" >&2; exit 2 ;;
esac
prefix=${prefix%/} # of /, the top, nothing is left: its keys begin with the one slash below

ANSWER_S=5 # for what concerns users, etcdctl itself would wait for good

ctl() {
    ETCDCTL_API=3 timeout --foreground "$ANSWER_S" etcdctl --endpoints "$endpoints" \
        --cacert "$folder/ca.pem" --cert "$folder/root.pem" --key "$folder/root.key" \
        "$@" >/dev/null || {
        code=$?
        [ "$code" -ne 124 ] || echo "no etcd at $endpoints answered within $ANSWER_S s, or none" \
            "that trusts, and is trusted by, $folder/ca.pem" >&2
        return "$code"
    }
}

ensure_user() { ctl user get "$1" 2>/dev/null || ctl user add "$1" --no-password; }

# ensure_role NAME PERMISSION: for one prefix; the slash keeps /neuron-di2 out.
ensure_role() {
    ctl role get "$1" 2>/dev/null || ctl role add "$1"
    ctl role grant-permission "$1" "$2" --prefix=true "$prefix/"
}

ctl user list # says why not, where nothing will work
ensure_user root
ctl role get root 2>/dev/null || ctl role add root
ctl user grant-role root root
ensure_role neuron-di-worker readwrite
ensure_role neuron-di-proxy read
for name in neuron-di-worker neuron-di-proxy; do
    ensure_user "$name"
    ctl user grant-role "$name" "$name"
done
ctl auth enable
echo "etcd at $endpoints asks for certificates; $prefix/ is open to workers and proxies only"
