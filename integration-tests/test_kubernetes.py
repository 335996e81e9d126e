"""The manifests of deploy/kubernetes against Kubernetes' schemas, this server and each other; and a pod's life."""

import asyncio
import copy
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from funitel.router.api.routes import OPERATIONS
from funitel.router.auth.access import Access
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.clients import client_of, stream
from funitel_testing.documents.command_lines import problems_of
from funitel_testing.documents.kubernetes import (
    CUSTOM,
    DEPLOY,
    OVERLAYS,
    CannotRender,
    Manifest,
    command_of,
    matches,
    pods_of,
    render,
    selectors_of,
    source_objects,
    validate,
)
from funitel_testing.servers import free_port, run_launcher, wait_until
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

ROOT = Path(__file__).parent.parent
WRITTEN = {"/data", "/tmp"}  # by a server
OURS = "registry.example.com/funitel"
SERVERS = ("funitel", "router", "shard", "worker")  # names of containers
DOWNWARD = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader", "POD_IP": "10.0.0.1"}
DOWNWARD |= {"POD_NAME": "funitel-worker-0"}
PROBES = ("startup", "liveness", "readiness")
SOURCES = source_objects()


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """The objects of an overlay."""
    return rendered(request.param)


def rendered(overlay: str) -> list[Manifest]:
    try:
        return copy.deepcopy(render(DEPLOY / "overlays" / overlay))
    except CannotRender as reason:
        pytest.skip(str(reason))


def objects(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {found["metadata"]["name"]: found for found in manifests if found["kind"] == kind}


def containers(manifests: list[Manifest]) -> list[tuple[Manifest, Manifest]]:
    """Our containers, each with its pod."""
    return [(pod, each) for pod in pods_of(manifests) for each in pod["spec"]["containers"] if each["name"] in SERVERS]


def flags(container: Manifest) -> dict[str, str]:
    return dict(word.split("=", 1) for word in container.get("args", ()) if word.startswith("--") and "=" in word)


# Schemas


@pytest.mark.parametrize(("name", "manifest"), SOURCES, ids=[name for name, _ in SOURCES])
def test_every_object_of_the_files_is_valid(name: str, manifest: Manifest) -> None:
    validate(manifest)


def test_every_rendered_object_is_valid(manifests: list[Manifest]) -> None:
    assert len(manifests) > 2
    for manifest in manifests:
        validate(manifest)
    names = [(found["kind"], found["metadata"]["name"]) for found in manifests]
    assert len(set(names)) == len(names)


def test_the_files_hold_every_kind_there_is_a_schema_for() -> None:
    assert set(CUSTOM) <= {manifest["kind"] for _, manifest in SOURCES}


def test_a_misspelt_field_is_refused() -> None:
    for _, manifest in SOURCES:
        broken = copy.deepcopy(manifest)
        broken.setdefault("spec", {})["noSuchField"] = 1
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(broken)
        for template in pods_of([broken := copy.deepcopy(manifest)]):
            template["spec"]["containers"][0]["noSuchField"] = 1
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                validate(broken)


# This server


def test_the_command_lines_parse(manifests: list[Manifest]) -> None:
    lines: list[tuple[list[str], dict[str, str]]] = []
    for _, container in containers(manifests):
        words = [re.sub(r"\$\((\w+)\)", lambda found: DOWNWARD[found[1]], word) for word in command_of(container)]
        words = [word.replace("/etc/funitel-fleet/fleet.toml", str(fleet_file())) for word in words]
        if words[:2] in (["funitel", "up"], ["funitel", "worker"]) and not has_fleet():
            continue
        lines += [(words, {}), ([*words, "--no-such-flag"], {})]
    problems = problems_of(lines)
    assert problems[::2] == [None] * (len(lines) // 2)
    assert None not in problems[1::2]


def has_fleet() -> bool:
    """Whether this version serves many models."""
    return find_spec("funitel.launcher.worker") is not None and find_spec("funitel.launcher.up") is not None


def fleet_file() -> Path:
    return DEPLOY / "overlays" / "fleet" / "fleet.toml"


def test_our_image_is_the_only_one_but_the_endpoint_pickers(manifests: list[Manifest]) -> None:
    for pod in pods_of(manifests):
        for container in pod["spec"]["containers"]:
            image, _, tag = container["image"].rpartition(":")
            assert tag
            assert (image == OURS) is (container["name"] in SERVERS)


def test_probes_lead_to_routes_that_answer_without_a_key(manifests: list[Manifest]) -> None:
    paths = {found.path for found in OPERATIONS if found.path.startswith("/health") and found.access is Access.PROBE}
    for _, container in containers(manifests):
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        probes = {
            name: container[f"{name}Probe"]
            for name in ("startup", "liveness", "readiness")
            if f"{name}Probe" in container
        }
        if "http" in ports:
            assert set(probes) == {"startup", "liveness", "readiness"}
            assert {probe["httpGet"]["path"] for probe in probes.values()} <= paths
            assert probes["liveness"]["httpGet"]["path"] == "/health/live"  # /health would kill pods that recover
            assert probes["readiness"]["httpGet"]["path"] == "/health/ready"
        for probe in probes.values():
            assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports


def test_containers_listen_where_their_ports_are(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        given = flags(container)
        ports = {port["name"]: str(port["containerPort"]) for port in container.get("ports", ())}
        listened = {"http": given.get("--port"), "workers": given.get("--worker-port")}
        listened["grpc"] = given.get("--listen", "").rpartition(":")[2] or None
        assert {name: port for name, port in listened.items() if port is not None} == ports
        annotations = pod["metadata"].get("annotations", {})
        if "http" in ports and "prometheus.io/port" in annotations:
            assert annotations["prometheus.io/port"] == ports["http"]
            assert annotations["prometheus.io/path"] in {found.path for found in OPERATIONS}


def test_a_pod_is_given_longer_than_its_drain(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        given, grace = flags(container), pod["spec"]["terminationGracePeriodSeconds"]
        if "--graceful-termination-timeout" in given:
            drain = float(given.get("--shutdown-delay", 0)) + float(given["--graceful-termination-timeout"])
            assert grace > drain
        if container["name"] in ("funitel", "router"):
            assert float(given["--shutdown-delay"]) > container["readinessProbe"]["periodSeconds"]
        if container["name"] == "shard":
            *program, url, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
            assert program == ["python", "-m", "funitel.launcher.wait_for_drain"]
            assert float(seconds) < grace
            host = (
                "127.0.0.1"
                if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "leader"
                else "$(LWS_LEADER_ADDRESS)"
            )
            assert url == f"http://{host}:8080"


def test_nothing_runs_as_root_or_writes_where_it_may_not(manifests: list[Manifest]) -> None:
    for pod in pods_of(manifests):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["spec"]["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
    for pod, container in containers(manifests):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert set(mounts) >= WRITTEN
        assert not any(mounts[path].get("readOnly") for path in WRITTEN)


def test_threads_fit_into_the_limit(manifests: list[Manifest]) -> None:
    for _, container in containers(manifests):
        threads = flags(container).get("--num-threads") or flags(container).get("--cores")
        assert threads is None or int(threads) <= int(container["resources"]["limits"]["cpu"])


# References


def test_selectors_select_pods_and_ports_exist(manifests: list[Manifest]) -> None:
    pods = pods_of(manifests)
    for name, selector in selectors_of(manifests):
        assert any(matches(selector, pod) for pod in pods), name
    for service in objects(manifests, "Service").values():
        selected = [pod for pod in pods if matches(service["spec"]["selector"], pod)]
        assert len(selected) == 1  # a Service that leads to two kinds of pods leads to the wrong one
        names = {port["name"] for each in selected[0]["spec"]["containers"] for port in each.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for policy in objects(manifests, "NetworkPolicy").values():
        selected = [pod for pod in pods if matches(policy["spec"]["podSelector"]["matchLabels"], pod)]
        names = {
            port["name"] for pod in selected for each in pod["spec"]["containers"] for port in each.get("ports", ())
        }
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
        assert named <= names


def test_workloads_select_their_own_pods_alone(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            selected = [pod for pod in pods_of(manifests) if matches(manifest["spec"]["selector"]["matchLabels"], pod)]
            assert selected == [manifest["spec"]["template"]]


def test_volumes_secrets_and_claims_exist(manifests: list[Manifest]) -> None:
    made = set(re.findall(r"kubectl create secret \w+ ([\w-]+)", (ROOT / "docs" / "kubernetes.md").read_text()))
    for manifest in manifests:
        claims = {found["metadata"]["name"] for found in manifest.get("spec", {}).get("volumeClaimTemplates", ())}
        for pod in pods_of([manifest]):
            volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
            for container in pod["spec"]["containers"]:
                assert {mount["name"] for mount in container.get("volumeMounts", ())} <= set(volumes) | claims
                for variable in container.get("env", ()):
                    secret = variable.get("valueFrom", {}).get("secretKeyRef")
                    assert secret is None or secret["name"] in made
                keys = flags(container).get("--api-key-file")
                if keys is not None:
                    (mount,) = [
                        each for each in container["volumeMounts"] if each["mountPath"] == str(Path(keys).parent)
                    ]
                    assert Path(keys).name in {item["path"] for item in volumes[mount["name"]]["secret"]["items"]}
            for volume in volumes.values():
                if "secret" in volume:
                    assert volume["secret"]["secretName"] in made
                if "configMap" in volume:
                    assert volume["configMap"]["name"] in objects(manifests, "ConfigMap")
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in objects(manifests, "PersistentVolumeClaim")


def test_budgets_scalers_and_pools_name_what_is_there(manifests: list[Manifest]) -> None:
    for scaled in objects(manifests, "ScaledObject").values():
        target = scaled["spec"]["scaleTargetRef"]
        deployment = objects(manifests, target["kind"])[target["name"]]
        assert "replicas" not in deployment["spec"]  # else each apply undoes what was scaled
        (budget,) = objects(manifests, "PodDisruptionBudget").values()
        assert budget["spec"]["maxUnavailable"] < scaled["spec"]["minReplicaCount"]
    for pool in objects(manifests, "InferencePool").values():
        picker = pool["spec"]["endpointPickerRef"]
        service = objects(manifests, "Service")[picker["name"]]
        assert picker["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}
        (pod,) = [pod for pod in pods_of(manifests) if matches(pool["spec"]["selector"]["matchLabels"], pod)]
        ports = {port["containerPort"] for each in pod["spec"]["containers"] for port in each["ports"]}
        assert {port["number"] for port in pool["spec"]["targetPorts"]} == ports
    for objective in objects(manifests, "InferenceObjective").values():
        assert objective["spec"]["poolRef"]["name"] in objects(manifests, "InferencePool")
    for binding in objects(manifests, "RoleBinding").values():
        assert binding["roleRef"]["name"] in objects(manifests, "Role")
        assert {subject["name"] for subject in binding["subjects"]} <= set(objects(manifests, "ServiceAccount"))
    for _, pod in enumerate(pods_of(manifests)):
        account = pod["spec"].get("serviceAccountName")
        assert account is None or account in objects(manifests, "ServiceAccount")


def known_metrics() -> dict[str, str]:
    """The kind of every metric of the server, by the names of its series."""
    found = {}
    for family in Metrics().registry.collect():
        for end in {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",)):
            found[family.name + end] = family.type
    return found


def test_queries_and_flags_name_metrics_of_this_server() -> None:
    known = known_metrics()
    (scaled,) = yaml.safe_load_all((DEPLOY / "components" / "keda" / "scaled-object.yaml").read_text())
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]}
    assert set(queries) == {"queue-wait", "queue-length", "kv-utilisation"}
    for query in queries.values():
        names = re.findall(r"\b(?:tgi|funitel)_\w+", query)
        assert names
        assert set(names) <= set(known)
        assert query.count("(") == query.count(")")
    assert known["tgi_request_queue_duration_bucket"] == "histogram"
    picker = next(yaml.safe_load_all((DEPLOY / "components" / "inference-pool" / "endpoint-picker.yaml").read_text()))
    given = flags(picker["spec"]["template"]["spec"]["containers"][0])
    for flag in ("--total-queued-requests-metric", "--kv-cache-usage-percentage-metric"):
        assert known[given[flag]] == "gauge"
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert f"`{given['--lora-info-metric']}`" in page


# Components


@pytest.mark.parametrize("component", ["tls", "gpu"])
def test_a_component_beside_an_overlay(component: str, tmp_path: Path) -> None:
    folder = DEPLOY / "overlays" / f"of-a-test-{component}"
    folder.mkdir()
    try:
        kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
        kustomization |= {"resources": ["../single"], "components": [f"../../components/{component}"]}  # type: ignore[dict-item]
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        found = rendered(folder.name)
    finally:
        (folder / "kustomization.yaml").unlink(missing_ok=True)
        folder.rmdir()
    for manifest in found:
        validate(manifest)
    ((_, container),) = containers(found)
    given = flags(container)
    if component == "gpu":
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "--num-threads" not in given
        return
    assert {container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "liveness", "readiness")} == {
        "HTTPS"
    }
    folders = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(given[flag]).parent) for flag in ("--tls-cert", "--tls-key")} <= folders


def test_a_link_to_a_service_is_not_used() -> None:
    ended = run_launcher("--model-id", "/nowhere", environ={"PROMETHEUS_PORT": "tcp://10.0.0.1:9090"})
    assert "PROMETHEUS_PORT=tcp://10.0.0.1:9090 is not used" in ended.err
    assert ended.last_line == "error: no such folder or file: /nowhere"


# Pods in motion


async def test_the_ranks_of_a_group_stay_until_its_router_has_drained(tmp_path: Path) -> None:
    """The containers of a leader and a worker as the manifests start them; all are told to stop at once."""
    model = save_tiny("llama", tmp_path / "model", max_position_embeddings=8192, eos_token_id=VOCAB_SIZE)
    (source,) = yaml.safe_load_all((DEPLOY / "overlays" / "tensor-parallel" / "leader-worker-set.yaml").read_text())
    leader, worker = pods_of([source])
    ports = {name: free_port() for name in ("8080", "8081", "29500", "worker")}
    pods = [(0, each) for each in leader["spec"]["containers"]] + [(1, each) for each in worker["spec"]["containers"]]
    running = [OneContainer(each, rank, model, ports, tmp_path) for rank, each in pods]
    url = f"http://127.0.0.1:{ports['8080']}"
    try:
        await asyncio.to_thread(wait_until, lambda: is_ready(url), 180)
        async with client_of(url) as client:
            answer = asyncio.create_task(stream(client, "Hello", max_new_tokens=1500))
            await asyncio.sleep(1)
            stopping = [asyncio.create_task(each.terminate(120)) for each in running]
            late = await stream(client, "Hello", max_new_tokens=4)  # within the delay
            assert len(late.ids) == 4
            assert len((await answer).ids) == 1500
        assert await asyncio.gather(*stopping) == [0, 0, 0]
    finally:
        for each in running:
            each.process.kill()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


class OneContainer:
    """A container of a group on this machine, where all pods have one address and so each port another number."""

    def __init__(self, spec: Manifest, rank: int, model: Path, ports: dict[str, int], folder: Path) -> None:
        self._ports = ports | ({"8081": ports["worker"]} if rank else {})
        self._here = {"LWS_WORKER_INDEX": str(rank), "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1"}
        program, *words = [self._changed(word, model) for word in command_of(spec)]
        left_out = ("--api-key-file", "--hostname")
        words = [word for word in words if not word.startswith(left_out)]
        modules = {"funitel-server": "funitel.model_server", "funitel-router": "funitel.router"}
        variables = {"POD_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._pre_stop = spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        with (folder / f"{spec['name']}-{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", modules[program], *words]
            self.process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)

    def _changed(self, word: str, model: Path) -> str:
        here = self._here | {"POD_IP": "127.0.0.1"}
        word = re.sub(r"\$\((\w+)\)", lambda found: here[found[1]], word)
        word = word.replace("HuggingFaceTB/SmolLM2-360M-Instruct", str(model)).replace(
            "--num-threads=4", "--num-threads=1"
        )
        return re.sub(r"(?<=[=:])(8080|8081|29500)$", lambda found: str(self._ports[found[1]]), word)

    async def terminate(self, grace_seconds: float) -> int:
        """Stop it in kubelet's order; returns its exit code."""
        if self._pre_stop is not None:
            program, *words = [self._changed(word, Path()) for word in self._pre_stop]
            assert program == "python"
            hook = await asyncio.create_subprocess_exec(sys.executable, *words)
            assert await asyncio.wait_for(hook.wait(), grace_seconds) == 0
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, grace_seconds)


def test_a_pods_life(tmp_path: Path) -> None:
    """Startup, traffic, scale signals, a lost shard and a drain, by the short form of the rehearsal."""
    model = save_tiny("llama", tmp_path / "model", max_position_embeddings=8192, eos_token_id=VOCAB_SIZE)
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "rehearse.py"), "--model", str(model), "--short"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    steps = [line.split()[:2] for line in done.stdout.splitlines() if not line.startswith("     ")]
    names = ("starts", "serves", "scales", "tells_gateways", "loses_its_shard", "drains")
    assert steps == [["ok", f"{name}:"] for name in names], done.stdout + done.stderr
    assert done.returncode == 0
