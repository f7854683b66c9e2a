# shellcheck shell=bash
# Processes that outlive the step which started them. STATE/NAME.pid has a process's id and when it
# started, so that only our own are ended: an id alone may be somebody else's by now.
# STATE/NAME.log has what it said.

# When a process started, in clock ticks since boot; fails where it has ended (proc(5), field 22).
start_ticks() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    # The name, in parentheses, may have spaces.
    # shellcheck disable=SC2086
    set -- ${stat##*) }
    [ "$1" != Z ] && echo "${20}"
}

# The id of a process that we started and that still runs; fails where there is none.
pid_of() {
    local pid ticks
    read -r pid ticks 2>/dev/null <"$STATE/$1.pid" || return 1
    [ -n "$ticks" ] && [ "$(start_ticks "$pid")" = "$ticks" ] && echo "$pid"
}

# Of the steps that start and end processes one at a time works in a folder of state.
alone() {
    [ -z "$IS_DRY" ] || return 0
    exec 9>"$STATE/lock"
    flock --nonblock 9 || missing "another step is at work in $STATE" "wait until it has ended"
}

# start NAME COMMAND…: in the background, of no terminal, unless it runs already.
start() {
    local name=$1 pid
    shift
    if [ -z "$IS_DRY" ] && pid=$(pid_of "$name"); then
        say "$name runs already (process $pid, $STATE/$name.log)"
        return
    fi
    show_to ">$(word "$STATE/$name.log") 2>&1 &" "$@"
    [ -z "$IS_DRY" ] || return 0
    setsid nohup "$@" >"$STATE/$name.log" 2>&1 </dev/null 9>&- & # the lock is the step's
    pid=$!
    echo "$pid $(start_ticks "$pid" || echo 0)" >"$STATE/$name.pid"
}

# It ended, or is too slow: its last words, and the end of this step.
give_up() {
    say "$(basename "$0"): $1 $2. Its last words ($STATE/$1.log):" >&2
    tail -n 15 "$STATE/$1.log" >&2
    exit 1
}

# until_up NAME COMMAND…: wait until the command succeeds. Gives up when NAME ends, or in time.
until_up() {
    local name=$1 end=$((SECONDS + READY_TIMEOUT_S))
    shift
    [ -z "$IS_DRY" ] || return 0
    until "$@" >/dev/null 2>&1; do
        pid_of "$name" >/dev/null || give_up "$name" "has ended"
        ((SECONDS < end)) || give_up "$name" "was not ready after $READY_TIMEOUT_S s"
        sleep 0.2
    done
}

# A worker, or the proxy, has said that it is ready.
has_said_ready() { grep -q 'event=ready' "$STATE/$1.log"; }

# stop NAME: ask it to end, which drains it, and see that it did.
stop() {
    local name=$1 pid end=$((SECONDS + STOP_TIMEOUT_S))
    if [ -n "$IS_DRY" ]; then
        show kill "<process of $name>"
        return
    fi
    if pid=$(pid_of "$name"); then
        show kill "$pid"
        kill "$pid" 2>/dev/null || true # it may have ended by itself since
        while pid_of "$name" >/dev/null; do
            if ((SECONDS >= end)); then
                say "$name did not end within $STOP_TIMEOUT_S s"
                kill -KILL "$pid" 2>/dev/null || true
                end=$((SECONDS + STOP_TIMEOUT_S))
            fi
            sleep 0.1
        done
        say "$name has ended"
    fi
    rm -f "$STATE/$name.pid"
}

# Names of all that we started and that may still run. A file of another form is not ours.
started() {
    local file
    for file in "$STATE"/*.pid; do
        if grep -qxE '[0-9]+ [0-9]+' "$file" 2>/dev/null; then basename "$file" .pid; fi
    done
}
