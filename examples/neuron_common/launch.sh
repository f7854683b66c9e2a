# shellcheck shell=bash
# Step 1, from any machine with AWS's command line and an account: COUNT instances beside each other
# in a cluster placement group, each with all its EFA interfaces, in a security group whose members
# may say anything to each other. What is there already is used again, and what lacks is added.

launch() {
    # Nobody launches by accident what costs money: a simulation shows the commands.
    [ -z "$IS_SIMULATED" ] || IS_DRY=yes
    need aws "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"
    need_setting REGION "the AWS region, such as us-west-2"
    need_setting SUBNET "a subnet in a zone that has $INSTANCE_TYPE"
    need_setting KEY_NAME "the key pair to log in with"
    alone
    EC2=(aws ec2 --region "$REGION")
    if [ -z "$IS_DRY" ] && [ -s "$STATE/instances" ]; then
        say "launched already: $(tr '\n' ' ' <"$STATE/instances")($STATE/instances)"
        make_security_group # SSH_FROM may be new
    else
        find_image
        make_security_group
        make_placement_group
        run_instances
    fi
    tell_addresses
}

# IMAGE, or the latest of AWS's images that says it has SDK; see README.md on which one.
find_image() {
    if [ -z "${IMAGE:-}" ]; then
        capture IMAGE '<IMAGE>' "${EC2[@]}" describe-images --owners amazon --include-deprecated \
            --filters "Name=name,Values=$IMAGE_NAME*" "Name=description,Values=*$SDK*" \
            --query 'sort_by(Images,&CreationDate)[-1].ImageId' --output text
        [ "$IMAGE" != None ] ||
            missing "no image $IMAGE_NAME says that it has SDK $SDK" "choose one: IMAGE=ami-…"
    fi
    run "${EC2[@]}" describe-images --image-ids "$IMAGE" \
        --query 'Images[].[Name,Description]' --output text
}

# EFA's own traffic passes only where a rule names the group itself, in both directions.
make_security_group() {
    local vpc
    capture vpc '<VPC>' "${EC2[@]}" describe-subnets --subnet-ids "$SUBNET" \
        --query 'Subnets[0].VpcId' --output text
    capture SECURITY_GROUP None "${EC2[@]}" describe-security-groups \
        --filters "Name=group-name,Values=$GROUP_NAME" "Name=vpc-id,Values=$vpc" \
        --query 'SecurityGroups[0].GroupId' --output text
    [ "$SECURITY_GROUP" != None ] || capture SECURITY_GROUP '<SECURITY_GROUP>' \
        "${EC2[@]}" create-security-group --vpc-id "$vpc" \
        --group-name "$GROUP_NAME" --description 'neuron-di: all traffic between its members' \
        --query GroupId --output text
    authorize ingress --protocol -1 --source-group "$SECURITY_GROUP"
    authorize egress --protocol -1 --source-group "$SECURITY_GROUP"
    [ -z "${SSH_FROM:-}" ] || authorize ingress --protocol tcp --port 22 --cidr "$SSH_FROM"
}

# authorize DIRECTION RULE…: it may be there already, of a run that was broken off.
authorize() {
    local answer
    set -- "${EC2[@]}" "authorize-security-group-$1" --group-id "$SECURITY_GROUP" "${@:2}"
    show "$@"
    [ -z "$IS_DRY" ] || return 0
    answer=$("$@" 2>&1) || [[ $answer == *InvalidPermission.Duplicate* ]] || {
        say "$answer" >&2
        exit 1
    }
}

# PLACEMENT: of run-instances. A Capacity Block's instances are near each other anyway, and it takes
# no group; another reservation may have been made in a group, which is then the one to name.
make_placement_group() {
    local found name=${PLACEMENT_GROUP:-$GROUP_NAME}
    PLACEMENT=()
    [ -z "${IS_CAPACITY_BLOCK:-}" ] || return 0
    PLACEMENT=(--placement "GroupName=$name")
    capture found 0 "${EC2[@]}" describe-placement-groups \
        --filters "Name=group-name,Values=$name" --query 'length(PlacementGroups)' --output text
    [ "$found" != 0 ] ||
        run "${EC2[@]}" create-placement-group --group-name "$name" --strategy cluster
}

# INTERFACES: one for each network card. The first one, card 0 and device 0, has the IP address;
# the others are device 1 of theirs.
interfaces() {
    local card common=Groups=$SECURITY_GROUP,SubnetId=$SUBNET
    if ((NUM_EFA == 0)); then
        INTERFACES=("NetworkCardIndex=0,DeviceIndex=0,$common")
        return
    fi
    INTERFACES=("NetworkCardIndex=0,DeviceIndex=0,$common,InterfaceType=efa")
    for ((card = 1; card < NUM_EFA; card++)); do
        INTERFACES+=("NetworkCardIndex=$card,DeviceIndex=1,$common,InterfaceType=$MORE_EFA")
    done
}

# The token makes a repeated order the same order, should the answer to this one be lost.
run_instances() {
    local reserved=() order instances
    interfaces
    [ -z "${RESERVATION:-}" ] || reserved=(--capacity-reservation-specification
        "CapacityReservationTarget={CapacityReservationId=$RESERVATION}")
    [ -z "${IS_CAPACITY_BLOCK:-}" ] ||
        reserved+=(--instance-market-options MarketType=capacity-block)
    order=(--image-id "$IMAGE" --instance-type "$INSTANCE_TYPE" --count "$COUNT"
        --key-name "$KEY_NAME" "${reserved[@]}" "${PLACEMENT[@]}"
        --block-device-mappings "DeviceName=/dev/sda1,Ebs={VolumeSize=$DISK_GIB,VolumeType=gp3}"
        --tag-specifications "ResourceType=instance,Tags=[{Key=Name,Value=$GROUP_NAME}]"
        --network-interfaces "${INTERFACES[@]}")
    capture instances '<INSTANCE>' "${EC2[@]}" run-instances "${order[@]}" \
        --client-token "$(token "${order[@]}")" --query 'Instances[].InstanceId' --output text
    [ -n "$IS_DRY" ] || tr '\t' '\n' <<<"$instances" >"$STATE/instances"
}

# token ORDER…: of this state folder and this order. Another folder, other instances; another order
# under the same token is refused.
token() {
    local file=$STATE/client_token sum
    if [ -n "$IS_DRY" ]; then
        echo '<TOKEN>'
    else
        [ -s "$file" ] || tr -d - </proc/sys/kernel/random/uuid >"$file"
        read -r sum _ < <(cksum <<<"$*")
        echo "$(<"$file")-$sum"
    fi
}

tell_addresses() {
    local instances=('<INSTANCE>')
    [ -n "$IS_DRY" ] || mapfile -t instances <"$STATE/instances"
    run "${EC2[@]}" wait instance-running --instance-ids "${instances[@]}"
    run "${EC2[@]}" describe-instances --instance-ids "${instances[@]}" --output table --query \
        'Reservations[].Instances[].[InstanceId,PrivateIpAddress,PublicIpAddress]'
    say "the private addresses, in this order, are --hosts of the other steps"
    ((NUM_EFA <= 1)) ||
        say "with several interfaces an instance gets no public address: README.md, Log in"
}
