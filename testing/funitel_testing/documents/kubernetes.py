"""Kubernetes manifests: rendered by kubectl, validated offline, and looked up for what they refer to."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import yaml  # type: ignore[import-untyped]

Manifest = dict[str, Any]
DEPLOY = Path(__file__).parents[3] / "deploy" / "kubernetes"
OVERLAYS = tuple(sorted(path.name for path in (DEPLOY / "overlays").iterdir()))
VERSION = kubernetes_validate.latest_version()
CUSTOM = {
    schema["properties"]["kind"]["const"]: schema
    for schema in (json.loads(path.read_text()) for path in sorted((DEPLOY / "schemas").glob("*.json")))
}
KINDS_OF_KUSTOMIZE = {"Kustomization", "Component"}


class CannotRender(Exception):
    """Why manifests cannot be rendered on this machine; one line."""


@cache
def render(folder: Path) -> list[Manifest]:
    """The objects of a kustomization. Raises: CannotRender."""
    if shutil.which("kubectl") is None:
        raise CannotRender("there is no kubectl (Debian: kubernetes-client)")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip()
        if "components" in said and "unknown field" in said:  # of kustomize before 3.7, as in Debian 12
            raise CannotRender("kubectl is older than 1.21, whose kustomize has no components")
        raise AssertionError(f"{folder.name}: {said}")
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def source_objects() -> list[tuple[str, Manifest]]:
    """Every whole object in the files of base, overlays and components: no patches, no kustomizations."""
    found = []
    for path in sorted(DEPLOY.rglob("*.yaml")):
        patched = {
            (path.parent / patch["path"]).resolve()
            for kustomization in path.parent.glob("kustomization.yaml")
            for patch in yaml.safe_load(kustomization.read_text()).get("patches", [])
            if "path" in patch
        }
        if path.resolve() in patched:
            continue
        for each in yaml.safe_load_all(path.read_text()):
            if each["kind"] not in KINDS_OF_KUSTOMIZE:
                found.append((f"{path.relative_to(DEPLOY)}: {each['kind']}", each))
    return found


def validate(manifest: Manifest) -> None:
    """Raise an error that says what is wrong with an object, unknown fields included."""
    schema = CUSTOM.get(manifest["kind"])
    if schema is None:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.validate(manifest, schema)
    for template in templates_of(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-template"} | template["metadata"]}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, VERSION, strict=True)


def templates_of(manifest: Manifest) -> list[Manifest]:
    """The pod templates of an object."""
    if manifest["kind"] in ("Deployment", "StatefulSet"):
        return [manifest["spec"]["template"]]
    if manifest["kind"] == "LeaderWorkerSet":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return []


def pods_of(manifests: list[Manifest]) -> list[Manifest]:
    """All pod templates."""
    return [template for manifest in manifests for template in templates_of(manifest)]


def matches(selector: Mapping[str, str], template: Manifest) -> bool:
    """Whether labels select the pods of a template."""
    labels = template["metadata"]["labels"]
    return all(labels.get(name) == value for name, value in selector.items())


def selectors_of(manifests: list[Manifest]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Every selector of pods, with the kind and name of its object; of a policy also those of its peers."""
    for manifest in manifests:
        name, spec = f"{manifest['kind']} {manifest['metadata']['name']}", manifest.get("spec", {})
        if manifest["kind"] == "Service":
            yield name, spec["selector"]
        elif "matchLabels" in spec.get("selector", {}):
            yield name, spec["selector"]["matchLabels"]
        if manifest["kind"] == "NetworkPolicy":
            yield name, spec["podSelector"]["matchLabels"]
            for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
                for peer in (*rule.get("from", ()), *rule.get("to", ())):
                    if "podSelector" in peer:
                        yield f"{name}, a peer", peer["podSelector"]["matchLabels"]
        for template in templates_of(manifest):
            for constraint in template["spec"].get("topologySpreadConstraints", ()):
                yield f"{name}, a constraint", constraint["labelSelector"]["matchLabels"]


def command_of(container: Manifest) -> list[str]:
    """The command line of a container with the image's program, as Kubernetes starts it."""
    words = [*container.get("command", ["text-generation-launcher"]), *container.get("args", ())]
    return [word.strip() for word in words]
