"""The launching step: what it orders from AWS, once. In AWS's place is a program that keeps a list.

Nothing has been launched by it: whether AWS takes the orders is judged by AWS's own command line,
where it is installed, and without a network.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from tutorial_kit import EXAMPLES, check_aws, run_step, shown_commands

TRN1 = EXAMPLES / "trn1"
IDS = {"REGION": "us-west-2", "SUBNET": "subnet-1", "KEY_NAME": "mine"}
# Remembers what was created; answers as the step's --query asks for it.
AWS = """#!/bin/bash
cd "$(dirname "$0")" && echo "$*" >>calls && touch rules
case "$*" in
    *describe-images*--owners*) echo "${FOUND_IMAGE-ami-1}" ;;
    *describe-subnets*) echo vpc-1 ;;
    *describe-security-groups*) cat group 2>/dev/null || echo None ;;
    *create-security-group*) echo sg-1 | tee group ;;
    *describe-placement-groups*) [ -e placed ] && echo 1 || echo 0 ;;
    *create-placement-group*) touch placed ;;
    *authorize-*)
        [ -z "$NO_ANSWER" ] || exit 255
        rule=$(cksum <<<"$*")
        if grep -qxF "$rule" rules; then
            echo 'An error occurred (InvalidPermission.Duplicate)' >&2 && exit 254
        fi
        echo "$rule" >>rules ;;
    *run-instances*) [ -z "$NO_CAPACITY" ] && printf 'i-1\\ti-2\\n' ;;
esac
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "aws").write_text(AWS)
    (folder / "aws").chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return IDS | {"PATH": path, "STATE": str(tmp_path / "state"), "COUNT": "2"}


def calls(environ: dict[str, str], verb: str) -> list[str]:
    lines = (Path(environ["PATH"].split(os.pathsep)[0]) / "calls").read_text().splitlines()
    return [line for line in lines if f" {verb} " in line]


def test_instances_are_launched_once_with_all_their_interfaces(environ: dict[str, str]) -> None:
    for _ in range(2):
        ended = run_step(TRN1 / "1-launch.sh", environ=environ)
        assert ended.returncode == 0, ended.stderr
    assert "launched already: i-1 i-2" in ended.stdout
    (order,) = calls(environ, "run-instances")
    assert "--image-id ami-1 --instance-type trn1.32xlarge --count 2" in order
    assert "--placement GroupName=neuron-di-trn1" in order
    interfaces = [word for word in order.split() if word.startswith("NetworkCardIndex=")]
    common = "Groups=sg-1,SubnetId=subnet-1,InterfaceType="
    assert interfaces == [f"NetworkCardIndex=0,DeviceIndex=0,{common}efa"] + [
        f"NetworkCardIndex={card},DeviceIndex=1,{common}efa-only" for card in range(1, 8)
    ]
    # Who is in the group reaches everybody in it, by all protocols, both ways.
    for way in ("ingress", "egress"):
        rule, again = calls(environ, f"authorize-security-group-{way}")
        assert rule == again
        assert rule.endswith("--group-id sg-1 --protocol -1 --source-group sg-1")
    assert len(calls(environ, "describe-instances")) == 2


def test_a_launch_that_failed_is_repeated_as_the_same_order(environ: dict[str, str]) -> None:
    ended = run_step(TRN1 / "1-launch.sh", environ=environ | {"NO_CAPACITY": "yes"})
    assert ended.returncode == 1
    ended = run_step(TRN1 / "1-launch.sh", environ=environ)
    assert ended.returncode == 0, ended.stderr
    first, second = calls(environ, "run-instances")
    assert first == second
    assert "--client-token " in first
    # Nor are the groups made twice.
    assert len(calls(environ, "create-security-group")) == 1
    assert len(calls(environ, "create-placement-group")) == 1


def test_rules_that_lack_are_added_by_the_next_run(environ: dict[str, str]) -> None:
    ended = run_step(TRN1 / "1-launch.sh", environ=environ | {"NO_ANSWER": "yes"})
    assert ended.returncode == 1
    assert calls(environ, "run-instances") == []
    for more in ({}, {"SSH_FROM": "203.0.113.7/32"}):
        ended = run_step(TRN1 / "1-launch.sh", environ=environ | more)
        assert ended.returncode == 0, ended.stderr
    assert len(calls(environ, "create-security-group")) == 1
    rules = (Path(environ["PATH"].split(os.pathsep)[0]) / "rules").read_text().splitlines()
    assert len(rules) == 3
    assert calls(environ, "authorize-security-group-ingress")[-1].endswith("203.0.113.7/32")
    assert len(calls(environ, "run-instances")) == 1


def test_another_order_has_another_token(environ: dict[str, str]) -> None:
    """AWS refuses an order that has the token of a different one, also of one that it refused."""
    for count in ("2", "1"):
        refused = environ | {"NO_CAPACITY": "yes", "COUNT": count}
        assert run_step(TRN1 / "1-launch.sh", environ=refused).returncode == 1
    first, second = (
        line.partition("--client-token ")[2].split()[0] for line in calls(environ, "run-instances")
    )
    assert first != second
    assert max(len(first), len(second)) <= 64


def test_without_an_image_of_the_sdk_nothing_is_made(environ: dict[str, str]) -> None:
    ended = run_step(TRN1 / "1-launch.sh", environ=environ | {"FOUND_IMAGE": "None"})
    assert ended.returncode == 2
    assert "says that it has SDK 2.28\n  mend: choose one: IMAGE=ami-" in ended.stderr
    assert calls(environ, "create-security-group") == []


def test_reserved_capacity_is_asked_for(environ: dict[str, str]) -> None:
    reserved = {"RESERVATION": "cr-1", "IS_CAPACITY_BLOCK": "yes"}
    ended = run_step(TRN1 / "1-launch.sh", environ=environ | reserved)
    assert ended.returncode == 0, ended.stderr
    (order,) = calls(environ, "run-instances")
    assert "CapacityReservationTarget={CapacityReservationId=cr-1}" in order
    assert "--instance-market-options MarketType=capacity-block" in order
    # Which has no placement group, and is refused in one.
    assert "--placement" not in order
    assert calls(environ, "create-placement-group") == []


def test_a_reservation_in_a_placement_group_is_asked_for_there(environ: dict[str, str]) -> None:
    reserved = {"RESERVATION": "cr-1", "PLACEMENT_GROUP": "theirs"}
    ended = run_step(TRN1 / "1-launch.sh", environ=environ | reserved)
    assert ended.returncode == 0, ended.stderr
    (order,) = calls(environ, "run-instances")
    assert "--placement GroupName=theirs " in order
    assert "MarketType" not in order


def test_a_simulation_orders_nothing(environ: dict[str, str]) -> None:
    ended = run_step(TRN1 / "1-launch.sh", "--simulate", environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert "run-instances" in ended.stdout
    assert not (Path(environ["PATH"].split(os.pathsep)[0]) / "calls").exists()


def test_answers_are_asked_for_as_they_are_read(environ: dict[str, str]) -> None:
    """Whatever format a reader's own settings of AWS's command line have."""
    shown = run_step(TRN1 / "1-launch.sh", "--dry-run", environ=environ)
    asking = [words for words in shown_commands(shown.stdout) if "--query" in words]
    assert len(asking) >= 6
    assert all("--output" in words for words in asking)


@pytest.mark.parametrize("tutorial", ["inf2", "trn1", "trn2"])
def test_the_disk_is_as_large_as_aws_asks_for(tutorial: str) -> None:
    shown = run_step(EXAMPLES / tutorial / "1-launch.sh", "--dry-run", environ=IDS).stdout
    (size,) = re.findall(r"VolumeSize=(\d+)", shown)
    assert int(size) >= 512


def test_awss_own_command_line_takes_the_orders() -> None:
    if shutil.which("aws") is None:
        pytest.skip("aws is not installed")
    reserved = {"RESERVATION": "cr-1", "IS_CAPACITY_BLOCK": "yes", "SSH_FROM": "203.0.113.7/32"}
    shown = run_step(TRN1 / "1-launch.sh", "--dry-run", environ=IDS | reserved)
    assert shown.returncode == 0, shown.stderr
    orders = {words[4]: words for words in shown_commands(shown.stdout)}
    assert len(orders) > 8
    for verb in ("run-instances", "describe-security-groups", "authorize-security-group-egress"):
        checked = check_aws([word.strip("<>") for word in orders[verb]])
        assert checked.returncode == 0, checked.stderr
