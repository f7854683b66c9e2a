# shellcheck shell=bash
# Step 8. Workers finish what they have and go, one by one; then the rest ends. It can be repeated.

# Where nothing was started, as on the machine of step 1, it says what is left in AWS.
drain() {
    alone
    if [ -n "$IS_DRY" ] || [ -n "$(started)" ]; then
        need_neuron_di
        use_key
        if is_first_host; then drain_workers; fi
        stop_started
    fi
    [ -z "$IS_SIMULATED" ] || leave_simulation
    left_in_aws
}

# The last worker of a role goes only where that is meant: --force.
drain_workers() {
    local name line names=()
    [ -n "$IS_DRY" ] || is_ready || return 0
    if has_several_hosts; then
        for line in "${MORE_WORKERS[@]}" "${WORKERS[@]}"; do names+=("${line%% *}"); done
    else
        names=(decode-1) # the others are of `serve`, which drains them when it is asked to end
    fi
    for name in "${names[@]}"; do
        [ -n "$IS_DRY" ] || is_listed "$name" || continue
        if is_last "$name"; then
            run neuron-di drain "$name" --url "$URL" --force
        else
            run neuron-di drain "$name" --url "$URL"
        fi
    done
}

is_listed() { neuron-di status --url "$URL" | grep "^$1 " >/dev/null; }

# Those of step 4 are the last ones, once step 7's are gone.
is_last() { [[ " ${WORKERS[*]} " == *" $1 "* ]]; }

# Workers end by themselves once they are drained; then the proxy, and what it needs.
stop_started() {
    local name
    if [ -n "$IS_DRY" ]; then
        if has_several_hosts; then stop proxy && stop etcd; else stop serve; fi
        return
    fi
    for name in $(started | grep -vxE 'proxy|etcd') proxy etcd; do
        stop "$name"
    done
    rm -rf "$STATE/tutorial-etcd" "$STATE/serve_again"
}

# What costs money until it is gone. Nothing of it is done here.
left_in_aws() {
    local region=${REGION:-REGION} instances=INSTANCE…
    [ ! -s "$STATE/instances" ] || instances=$(tr '\n' ' ' <"$STATE/instances")
    say
    say "What AWS has of this tutorial, from where 1-launch.sh ran:"
    say "  aws ec2 terminate-instances --region $region --instance-ids $instances"
    say "  aws ec2 wait instance-terminated --region $region --instance-ids $instances"
    ((NUM_EFA <= 1)) || # else the subnet gave the address, and takes it back
        say "  aws ec2 release-address --region $region --allocation-id …, for each Elastic IP"
    say "  aws ec2 delete-placement-group --region $region --group-name $GROUP_NAME"
    say "  aws ec2 delete-security-group --region $region --group-id …, named $GROUP_NAME"
    say "To launch anew afterwards, forget these: rm -r $(word "$STATE"), there"
}
