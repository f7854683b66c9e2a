"""The manifests ask for what the instances have, and neuron-di takes every flag and variable."""

import re
from typing import Any

import pytest
import yaml
from manifest_kit import (
    CORES_PER_DEVICE,
    KUBERNETES,
    OVERLAYS,
    container,
    environ,
    of_kind,
    options,
    pods,
    rendered,
    settings,
    walk,
)

from neuron_di.cli import _add_proxy_flags
from neuron_di.config import FlagParser
from neuron_di.order_commands import add_drain_flags

FILES = sorted(KUBERNETES.rglob("*.yaml"))
WORKERS = ("prefill", "decode")
overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def ports_of(overlay: str) -> dict[str, int]:
    """Those of the tutorials' scripts. In pods each worker is the first one of its host."""
    chosen = settings(overlay.partition("-")[0])
    first = int(chosen["WORKER_PORT"])
    return {
        "proxy": int(chosen["PROXY_PORT"]),
        "etcd": int(chosen["ETCD_PORT"]),
        "http": first,
        "signals": first + 1,
        "kv-tcp": first + 2,
        "kv-nrt": first + 3,
        "neuron-boot": int(chosen["BOOTSTRAP_PORT"]),
    }


def test_the_files_are_found() -> None:
    assert len(FILES) > 12
    assert {path.parent.name for path in FILES} == {"base", *OVERLAYS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_nothing_is_privileged_or_the_hosts(path: Any) -> None:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert all(documents)
    forbidden = {"privileged", "hostNetwork", "hostPID", "hostIPC", "hostPath", "hostPort"}
    assert not forbidden & {key for key, _ in walk(documents)}
    added = [value for key, value in walk(documents) if key == "add"]
    assert all(names == ["IPC_LOCK"] for names in added)


@overlays
def test_pods_may_do_no_more_than_they_must(overlay: str) -> None:
    has_efa = int(settings(overlay.partition("-")[0])["NUM_EFA"]) > 0
    for name, pod in pods(rendered(overlay)).items():
        assert pod["spec"]["automountServiceAccountToken"] is False
        # A Service's variables may be NEURON_DI_…, and neuron-di refuses what it does not know.
        assert pod["spec"]["enableServiceLinks"] is False
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        context = container(pod)["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        # An added capability is of no use to another user than root.
        needs_memory_locked = has_efa and name in (*WORKERS, "compile")
        assert ("add" in context["capabilities"]) is needs_memory_locked
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is not needs_memory_locked


@overlays
def test_neuron_di_takes_every_flag_and_variable(overlay: str) -> None:
    documents = rendered(overlay)
    made = {
        name: options(documents, pod) for name, pod in pods(documents).items() if name != "etcd"
    }
    assert {"prefill", "decode", "proxy", "compile"} == made.keys()
    for role in WORKERS:
        worker = made[role]
        assert worker.role == role
        assert (worker.worker_id, worker.announce_host) == ("decode-6b5d9c7f4-x2x9q", "10.0.3.7")
        assert (worker.host, worker.insecure) == ("0.0.0.0", True)
        assert worker.engine.device == "neuron"
        # What is compiled is what is served.
        compiled = made["compile"].engine()
        for key in ("tp", "context_tokens", "decode_batch", "dtype", "neuron"):
            assert getattr(compiled, key) == getattr(worker.engine, key), key
        assert made["compile"].model == worker.model
        low, high = made["proxy"].addresses.worker_ports.split("-")
        assert int(low) <= worker.port <= int(high)
        assert worker.etcd.etcd == made["proxy"].etcd.etcd == ("etcd:2379",)


@overlays
def test_ports_are_those_of_the_scripts_and_all_are_listed(overlay: str) -> None:
    documents, ports = rendered(overlay), ports_of(overlay)
    made = pods(documents)
    named = {
        name: {port["name"]: port["containerPort"] for port in container(pod).get("ports", ())}
        for name, pod in made.items()
    }
    assert named["proxy"] == {"http": ports["proxy"]}
    assert named["etcd"]["client"] == ports["etcd"]
    worker_ports = {key: ports[key] for key in ports if key not in ("proxy", "etcd")}
    for role in WORKERS:
        assert named[role] == worker_ports
        worker = options(documents, made[role])
        assert worker.port == ports["http"]
        assert worker.signal_port == ports["signals"]
        assert worker.kv_transfer.transfer_port == ports["kv-tcp"]
        assert worker.kv_transfer.nrt_control_port == ports["kv-nrt"]
        boot = environ(documents, made[role]).get("NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT")
        assert boot == (None if overlay == "inf2" else str(ports["neuron-boot"]))
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    listed = {int(port) for port in re.findall(r"^\| (\d+) \|", readme, re.MULTILINE)}
    assert {port for each in named.values() for port in each.values()} <= listed
    services = of_kind(documents, "Service")
    assert {port["port"] for each in services.values() for port in each["spec"]["ports"]} <= listed


@overlays
def test_a_pod_asks_for_what_its_cores_and_its_instance_have(overlay: str) -> None:
    documents, chosen = rendered(overlay), settings(overlay.partition("-")[0])
    for name in (*WORKERS, "compile"):
        pod = pods(documents)[name]
        asked = container(pod)["resources"]
        selector = pod["spec"]["nodeSelector"]
        assert selector == {"node.kubernetes.io/instance-type": chosen["INSTANCE_TYPE"]}
        num_devices, num_efa = asked_for(documents, pod)
        tp = options(documents, pod).tp if name == "compile" else options(documents, pod).engine.tp
        assert tp == num_devices * CORES_PER_DEVICE[overlay]
        # Whole nodes, but for the half and the third of one that README.md speaks of.
        parts = {"trn2-dra": 2, "inf2": 3}.get(overlay, 1)
        assert num_devices * CORES_PER_DEVICE[overlay] * parts == int(chosen["NUM_CORES"])
        assert num_efa * parts == int(chosen["NUM_EFA"])
        assert ("hugepages-2Mi" in asked["limits"]) is (num_efa > 0)
        assert asked["requests"]["memory"] == asked["limits"]["memory"]


def asked_for(documents: Any, pod: Any) -> tuple[int, int]:
    """Neuron devices and EFA adapters, by the plugins' resources or by a claim."""
    asked = container(pod)["resources"]
    if "claims" not in asked:
        limits = asked["limits"]
        return limits["aws.amazon.com/neuron"], limits.get("vpc.amazonaws.com/efa", 0)
    assert not {"aws.amazon.com/neuron", "vpc.amazonaws.com/efa"} & asked["limits"].keys()
    (claimed,) = asked["claims"]
    (claim,) = pod["spec"]["resourceClaims"]
    assert claim["name"] == claimed["name"]
    template = of_kind(documents, "ResourceClaimTemplate")[claim["resourceClaimTemplateName"]]
    devices = template["spec"]["spec"]["devices"]
    counts = {
        each["exactly"]["deviceClassName"]: each["exactly"]["count"] for each in devices["requests"]
    }
    (constraint,) = devices["constraints"]
    assert set(constraint["requests"]) == {each["name"] for each in devices["requests"]}
    return counts["neuron.aws.com"], counts["efa.networking.k8s.aws"]


@overlays
def test_what_is_mounted_and_named_is_there(overlay: str) -> None:
    documents = rendered(overlay)
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    secrets = set(re.findall(r"create secret generic (\S+)", readme))
    claims = of_kind(documents, "PersistentVolumeClaim").keys()
    for name, pod in pods(documents).items():
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", ())}
        owner = of_kind(documents, "Deployment", "StatefulSet", "Job")[name]
        made = {each["metadata"]["name"] for each in owner["spec"].get("volumeClaimTemplates", ())}
        mounted = {each["name"] for each in container(pod)["volumeMounts"]}
        assert mounted == volumes.keys() | made, name
        paths = [each["mountPath"] for each in container(pod)["volumeMounts"]]
        assert len(paths) == len(set(paths))
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            elif "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            else:
                assert "emptyDir" in volume
        assert environ(documents, pod) is not None  # of ConfigMaps that exist


@overlays
def test_what_files_are_named_come_from_the_secrets(overlay: str) -> None:
    """A key of a secret is a file's name: `--from-file` in README.md says which there are."""
    documents = rendered(overlay)
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    files: dict[str, set[str]] = {}
    for name, rest in re.findall(r"create secret generic (\S+)(.*)", readme):
        given = re.findall(r"--from-file=(\S+)", rest)
        files[name] = {each.partition("=")[0].rpartition("/")[2] for each in given}
    named = 0
    for pod in pods(documents).values():
        mounts = {each["name"]: each["mountPath"] for each in container(pod)["volumeMounts"]}
        text = yaml.safe_dump([container(pod), environ(documents, pod)])
        for volume in pod["spec"].get("volumes", ()):
            if "secret" in volume:
                there = files[volume["secret"]["secretName"]]
                used = set(re.findall(rf"{mounts[volume['name']]}/([\w.-]+)", text))
                assert used == there
                named += len(used)
    assert named >= 10


@overlays
def test_selectors_find_their_pods_and_probes_their_ports(overlay: str) -> None:
    documents = rendered(overlay)
    made = pods(documents)
    labels = {name: pod["metadata"]["labels"] for name, pod in made.items()}

    def found_by(selector: Any) -> set[str]:
        wanted = selector.get("matchLabels", {})
        among = {each["key"]: each["values"] for each in selector.get("matchExpressions", ())}
        return {
            name
            for name, its in labels.items()
            if wanted.items() <= its.items() and all(its.get(k) in v for k, v in among.items())
        }

    for name, owner in of_kind(documents, "Deployment", "StatefulSet").items():
        assert found_by(owner["spec"]["selector"]) == {name}
    for name, service in of_kind(documents, "Service").items():
        assert found_by({"matchLabels": service["spec"]["selector"]}) == {name}
        ports = {port["name"] for port in container(made[name])["ports"]}
        assert {each.get("targetPort", each["name"]) for each in service["spec"]["ports"]} <= ports
    for name, budget in of_kind(documents, "PodDisruptionBudget").items():
        assert found_by(budget["spec"]["selector"]) == {name}
    policies = of_kind(documents, "NetworkPolicy")
    assert found_by(policies["workers"]["spec"]["podSelector"]) == set(WORKERS)
    for policy in policies.values():
        for rule in policy["spec"]["ingress"]:
            assert all(found_by(each["podSelector"]) for each in rule.get("from", ()))
    for pod in made.values():
        ports = {port["name"] for port in container(pod).get("ports", ())}
        probes = [value for key, value in container(pod).items() if key.endswith("Probe")]
        assert all(each["httpGet"]["port"] in ports for each in probes if "httpGet" in each)


@overlays
def test_readiness_is_the_proxys_own_word_and_liveness_is_not(overlay: str) -> None:
    made = pods(rendered(overlay))
    proxy = container(made["proxy"])
    assert proxy["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert proxy["livenessProbe"]["httpGet"]["path"] == "/live"  # 200 while workers lack
    for role in WORKERS:
        worker = container(made[role])
        paths = {
            worker[f"{kind}Probe"]["httpGet"]["path"]
            for kind in ("startup", "readiness", "liveness")
        }
        assert paths == {"/status"}
        startup = worker["startupProbe"]
        # Weights of hundreds of gigabytes from a shared disk: neuron_cores.LOAD_TIMEOUT_S.
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600


@overlays
def test_a_pod_that_goes_is_drained_and_has_the_time_for_it(overlay: str) -> None:
    documents = rendered(overlay)
    made = pods(documents)
    (port,) = of_kind(documents, "Service")["proxy"]["spec"]["ports"]
    for role in WORKERS:
        # A shell's: Kubernetes fills in variables in `args`, and not here.
        shell, flag, script = container(made[role])["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        assert "$(POD" not in script
        found = re.search(r"exec timeout (\d+) neuron-di drain (.+)", script.replace("\\\n", " "))
        assert found is not None
        parser = FlagParser(prog="neuron-di drain")
        _add_proxy_flags(parser)
        add_drain_flags(parser)
        flags = parser.parse_args(found[2].split())
        assert flags.worker.strip('"') == "$POD_NAME"
        assert "POD_NAME" in environ(documents, made[role])
        assert flags.url == f"http://proxy:{port['port']}"
        assert not flags.force
        assert flags.timeout_s < int(found[1])
        grace_s = made[role]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > int(found[1]) + options(documents, made[role]).drain_timeout_s
    proxy = made["proxy"]
    (sleep, wait_s) = container(proxy)["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    drain_timeout_s = options(documents, proxy).limits.drain_timeout_s
    assert proxy["spec"]["terminationGracePeriodSeconds"] > int(wait_s) + drain_timeout_s


@overlays
def test_what_compiles_comes_first_and_brings_all_that_it_needs(overlay: str) -> None:
    """README.md: kubectl apply -k … -l neuron-di/step=compile."""
    documents = rendered(overlay)
    chosen = tuple(
        each
        for each in documents
        if each["metadata"].get("labels", {}).get("neuron-di/step") == "compile"
    )
    kinds = {each["kind"] for each in chosen}
    assert kinds - {"ResourceClaimTemplate"} == {
        "ConfigMap",
        "Job",
        "Namespace",
        "PersistentVolumeClaim",
    }
    (pod,) = pods(chosen).values()
    assert options(chosen, pod).tp > 1
    claims = of_kind(chosen, "PersistentVolumeClaim").keys()
    named = [value["claimName"] for key, value in walk(pod) if key == "persistentVolumeClaim"]
    assert set(named) == set(claims)
    templates = {value for key, value in walk(pod) if key == "resourceClaimTemplateName"}
    assert (overlay == "trn2-dra") is bool(templates)
    if templates:
        assert of_kind(chosen, "ResourceClaimTemplate").keys() == templates
