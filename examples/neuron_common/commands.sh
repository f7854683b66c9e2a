# shellcheck shell=bash
# Commands are printed before they run, so that a reader could type them. --dry-run does no more.

say() { printf '%s\n' "$*"; }

# What came of it, or what is next: nothing in a dry run.
tell() { [ -n "$IS_DRY" ] || say "$@"; }

# What is missing, and how to get it. Nothing was done yet: it can be mended, and the step repeated.
missing() {
    printf '%s: %s\n  mend: %s\n' "$(basename "$0")" "$1" "$2" >&2
    exit 2
}

# A program, and how to get it. A dry run needs none.
need() {
    [ -n "$IS_DRY" ] || command -v "$1" >/dev/null || missing "the program $1 is not here" "$2"
}

need_neuron_di() {
    need neuron-di "source the SDK's environment, then in the repository: pip install '.[etcd]'"
    need python3 "sudo apt-get install python3"
    need curl "sudo apt-get install curl"
}

# A setting that nobody can guess. A dry run shows its name in its place.
need_setting() {
    [ -z "${!1:-}" ] || return 0
    if [ -n "$IS_DRY" ]; then
        printf -v "$1" '<%s>' "$1"
    else
        missing "$1 is not set: $2" "export $1=…, or write it into settings.sh"
    fi
}

# One word as a shell needs it: quoted where it must be, and only there.
word() {
    local plain='^[A-Za-z0-9_./:=,@%+<>-]+$'
    if [[ $1 =~ $plain ]]; then printf '%s' "$1"; else printf '%s' "${1@Q}"; fi
}

# A command as one would type it, long ones over several lines; an option and its value on one.
show() {
    local line='$' text
    while [ $# -gt 0 ]; do
        text=$(word "$1")
        if [[ $1 == -* && $# -ge 2 && $2 != -* ]]; then
            text+=" $(word "$2")"
            shift
        fi
        shift
        if ((${#line} + ${#text} > 97)); then
            printf '%s \\\n' "$line"
            line='   '
        fi
        line+=" $text"
    done
    printf '%s\n' "$line"
}

# show_to REDIRECTION COMMAND…: with where its output goes, on a line of its own.
show_to() { printf '%s \\\n    %s\n' "$(show "${@:2}")" "$1"; }

run() {
    show "$@"
    [ -n "$IS_DRY" ] || "$@"
}

# capture VARIABLE PLACEHOLDER COMMAND…: what the command prints; with --dry-run the placeholder.
capture() {
    local variable=$1 placeholder=$2 output
    shift 2
    show "$@"
    if [ -n "$IS_DRY" ]; then
        printf -v "$variable" '%s' "$placeholder"
    else
        output=$("$@") || return
        printf -v "$variable" '%s' "$output"
    fi
}

# Ask again, twice a second, until the command succeeds. Fails after TIMEOUT_S.
until_succeeds() {
    local timeout_s=$1 end
    shift
    end=$((SECONDS + timeout_s))
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.5
    done
}
