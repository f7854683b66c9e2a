# shellcheck shell=bash
# Step 1, from any machine with AWS's command line and an account: COUNT instances beside each other
# in a cluster placement group, each with all its EFA interfaces, in a security group whose members
# may say anything to each other. What is there already is used again.

launch() {
    # Nobody launches by accident what costs money: a simulation shows the commands.
    [ -z "$IS_SIMULATED" ] || IS_DRY=yes
    need aws "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html"
    need_setting REGION "the AWS region, such as us-west-2"
    need_setting SUBNET "a subnet in a zone that has $INSTANCE_TYPE"
    need_setting KEY_NAME "the key pair to log in with"
    EC2=(aws ec2 --region "$REGION")
    if [ -z "$IS_DRY" ] && [ -s "$STATE/instances" ]; then
        say "launched already: $(tr '\n' ' ' <"$STATE/instances")($STATE/instances)"
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
    [ "$SECURITY_GROUP" = None ] || return 0
    capture SECURITY_GROUP '<SECURITY_GROUP>' "${EC2[@]}" create-security-group --vpc-id "$vpc" \
        --group-name "$GROUP_NAME" --description 'neuron-di: all traffic between its members' \
        --query GroupId --output text
    run "${EC2[@]}" authorize-security-group-ingress --group-id "$SECURITY_GROUP" \
        --protocol -1 --source-group "$SECURITY_GROUP"
    run "${EC2[@]}" authorize-security-group-egress --group-id "$SECURITY_GROUP" \
        --protocol -1 --source-group "$SECURITY_GROUP"
    [ -z "${SSH_FROM:-}" ] || run "${EC2[@]}" authorize-security-group-ingress \
        --group-id "$SECURITY_GROUP" --protocol tcp --port 22 --cidr "$SSH_FROM"
}

make_placement_group() {
    local found
    capture found 0 "${EC2[@]}" describe-placement-groups \
        --filters "Name=group-name,Values=$GROUP_NAME" --query 'length(PlacementGroups)'
    [ "$found" != 0 ] ||
        run "${EC2[@]}" create-placement-group --group-name "$GROUP_NAME" --strategy cluster
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
    local reserved=() instances
    interfaces
    [ -z "${RESERVATION:-}" ] || reserved=(--capacity-reservation-specification
        "CapacityReservationTarget={CapacityReservationId=$RESERVATION}")
    [ -z "${IS_CAPACITY_BLOCK:-}" ] ||
        reserved+=(--instance-market-options MarketType=capacity-block)
    capture instances '<INSTANCE>' "${EC2[@]}" run-instances --image-id "$IMAGE" \
        --instance-type "$INSTANCE_TYPE" --count "$COUNT" --key-name "$KEY_NAME" \
        --client-token "$(token)" "${reserved[@]}" --placement "GroupName=$GROUP_NAME" \
        --block-device-mappings "DeviceName=/dev/sda1,Ebs={VolumeSize=$DISK_GIB,VolumeType=gp3}" \
        --tag-specifications "ResourceType=instance,Tags=[{Key=Name,Value=$GROUP_NAME}]" \
        --network-interfaces "${INTERFACES[@]}" \
        --query 'Instances[].InstanceId' --output text
    [ -n "$IS_DRY" ] || tr '\t' '\n' <<<"$instances" >"$STATE/instances"
}

# Of this state folder: another folder, other instances.
token() {
    local file=$STATE/client_token
    if [ -n "$IS_DRY" ]; then
        echo '<TOKEN>'
    else
        [ -s "$file" ] || tr -d - </proc/sys/kernel/random/uuid >"$file"
        cat "$file"
    fi
}

tell_addresses() {
    local instances=('<INSTANCE>')
    [ -n "$IS_DRY" ] || mapfile -t instances <"$STATE/instances"
    run "${EC2[@]}" wait instance-running --instance-ids "${instances[@]}"
    run "${EC2[@]}" describe-instances --instance-ids "${instances[@]}" --output table --query \
        'Reservations[].Instances[].[InstanceId,PrivateIpAddress,PublicIpAddress]'
    say "the private addresses, in this order, are --hosts of the other steps"
    say "with several interfaces an instance gets no public address: README.md, Log in"
}
