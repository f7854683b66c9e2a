#!/bin/sh
# Certificates for etcd over TLS: an authority, one server certificate for all members, and a
# client certificate for each user of etcd, whose name is the certificate's CN.
#
#     make_certificates.sh FOLDER HOST[,HOST...] [USER...]
#
# HOSTs are the names and addresses by which anybody reaches an etcd member. USERs default to
# root (who manages etcd), neuron-di-worker and neuron-di-proxy. What is there already is kept, so
# that a user can be added later; to replace a certificate, delete it first.
set -eu
umask 077

if [ $# -lt 2 ]; then
    sed -n '5s/^# *//p' "$0" >&2
    exit 2
fi
folder=$1
hosts=$2
shift 2
[ $# -gt 0 ] || set -- root neuron-di-worker neuron-di-proxy

# A user's files are named after it, and ca and server are not users'.
for user in "$@"; do
    case $user in
    ca | server | -* | *[!0-9A-Za-z._-]* | '')
        echo "$user cannot be a user here: letters, digits and ._- only, neither ca nor server" >&2
        exit 2
        ;;
    esac
done

CA_DAYS=3650
DAYS=365

names=
IFS=,
for host in $hosts; do
    case $host in
    *[!0-9A-Za-z._:*-]*) echo "$host is neither a name nor an address" >&2; exit 2 ;;
    *:*) kind=IP check=checkip ;;
    *[!0-9.]*) kind=DNS check=checkhost ;;
    *) kind=IP check=checkip ;;
    esac
    names=$names${names:+,}$kind:$host
    [ -e "$folder/server.pem" ] || continue
    if openssl x509 -in "$folder/server.pem" -noout "-$check" "$host" | grep -q 'NOT match'; then
        echo "$folder/server.pem is kept, and is not for $host: delete it for a new one" >&2
        exit 1
    fi
done

unset IFS
mkdir -p "$folder"
cd "$folder"
extensions=$(mktemp)
said=$(mktemp)
trap 'rm -f "$extensions" "$said"' EXIT

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

# sign NAME CN EXTENSIONS
sign() {
    [ ! -e "$1.pem" ] || return 0
    new_key "$1.key"
    printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n%b' "$3" \
        >"$extensions"
    openssl req -new -key "$1.key" -subj "/CN=$2" |
        openssl x509 -req -sha256 -days "$DAYS" -CA ca.pem -CAkey ca.key \
            -set_serial "0x$(openssl rand -hex 16)" -extfile "$extensions" \
            -out "$1.pem.part" 2>"$said" || { cat "$said" >&2; exit 1; }
    mv "$1.pem.part" "$1.pem"
    echo "$folder/$1.pem"
}

if [ ! -e ca.pem ]; then
    new_key ca.key
    openssl req -x509 -new -sha256 -key ca.key -subj "/CN=neuron-di etcd authority" \
        -days "$CA_DAYS" -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.pem.part
    mv ca.pem.part ca.pem
    echo "$folder/ca.pem"
fi
# Members are clients of each other, so the server's certificate is good for both.
sign server etcd "extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=$names\n"
# Workers show theirs to each other, too, as clients and as servers (--transfer-tls-cert). It names
# no host, so nobody takes it for etcd's.
for user in "$@"; do
    sign "$user" "$user" "extendedKeyUsage=clientAuth,serverAuth\n"
done
chmod 644 ./*.pem
