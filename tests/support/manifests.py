"""Rendered manifests: made by helm and kustomize, held against Kubernetes' schemas and the restricted pod security standard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from support.tools import run_tool

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "slotstream"
SCHEMAS = ROOT / "tests" / "schemas"
NEWEST, OLDEST, OLDEST_WITH_SIDECARS = "1.37", "1.27", "1.29"  # Of Kubernetes, as the chart says.
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def helm(*options: str, chart: Path = CHART, release: str = "slotstream", by: str = "helm") -> list[Any]:
    """What `helm template` makes of the chart with these options."""
    text = run_tool(by, "template", release, str(chart), "--namespace", "ml", *options)
    return [document for document in yaml.safe_load_all(text) if document]


def kustomize(directory: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(run_tool("kubectl", "kustomize", str(directory))) if document]


def one(documents: list[Any], kind: str, name: str | None = None) -> Any:
    """The only document of a kind, and of a name where there are several."""
    (found,) = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    return found


def pod_of(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def containers_of(pod: Any) -> list[Any]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def mode_of(document: Any) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


@cache
def _crd(kind: str, version: str) -> Any:
    for path in SCHEMAS.glob("*.yaml"):
        crd = yaml.safe_load(path.read_text())
        if crd["spec"]["names"]["kind"] == kind:
            (found,) = [v for v in crd["spec"]["versions"] if v["name"] == version]
            return _strict(found["schema"]["openAPIV3Schema"])
    raise AssertionError(f"no schema of {kind}")


def _strict(schema: Any) -> Any:
    """A custom resource's schema in which a field that it does not name is an error, as the API server's strict mode has it."""
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) if key in ("items", "additionalProperties") else value for key, value in schema.items()}
    if "(?i)" in schema.get("pattern", ""):  # Go takes a flag anywhere, Python at the start only.
        made["pattern"] = "(?i)" + schema["pattern"].replace("(?i)", "")
    if "properties" in schema:
        made["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and made.get("properties"):
            made.setdefault("additionalProperties", False)
    return made


def validate(document: Any, version_of_kubernetes: str = NEWEST) -> None:
    """Strictly, against Kubernetes' own schemas and those of tests/schemas. Raises what the validator raises."""
    group, _, version = document["apiVersion"].rpartition("/")
    if "." in group and not group.endswith(".k8s.io"):
        schema = _crd(document["kind"], version)
        metadata = {"type": "object", "required": ["name"]}
        jsonschema.validate(document, {**schema, "properties": {**schema["properties"], "metadata": metadata}})
    else:
        kubernetes_validate.validate(document, version_of_kubernetes, strict=True)


def not_restricted(pod: Any) -> Iterator[str]:
    """What of a pod the restricted pod security standard forbids."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", ()):
        if not volume.keys() - {"name"} <= _VOLUMES:
            yield f"volume {volume}"
    whole = pod.get("securityContext", {})
    for container in containers_of(pod):
        name, own = container["name"], container.get("securityContext", {})
        said = {**whole, **own}
        if said.get("runAsNonRoot") is not True or said.get("runAsUser") == 0:
            yield f"{name} may be root"
        if said.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name} has no seccomp profile"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{name} may gain privileges"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield f"{name} has capabilities"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield f"{name} takes a port of the host"


def transfer_config(arguments: list[str]) -> Any:
    """What a vLLM's arguments say to --kv-transfer-config."""
    return json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
