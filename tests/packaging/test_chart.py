"""The Helm chart: every rendering is valid, restricted and holds no secret; it is what kustomize makes; and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate.utils import ValidationError
from support.manifests import (
    CHART,
    OLDEST,
    OLDEST_WITH_SIDECARS,
    containers_of,
    helm,
    kustomize,
    mode_of,
    not_restricted,
    one,
    pod_of,
    transfer_config,
    validate,
)
from support.secure import Authority, entry, token, write_tokens
from support.tools import run_tool

from slotstream.cli.serve_arguments import add_serve_arguments, config_from_arguments
from slotstream.connector.options import ConnectorOptions
from slotstream.server.app import _LAST_CALLS_S
from slotstream.server.config import ServerConfig
from slotstream.server.processes.workers import _STOP_S
from slotstream.store.upkeep.retention import Policy, Rule

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy" / "kubernetes"
MONITORED = tuple(f"monitoring.{kind}.enabled=true" for kind in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard"))
TLS = ("tls.enabled=true", "tls.certManager.enabled=true", "tls.certManager.issuerRef.name=ours")
RETENTION = ("retention.enabled=true",)
EXTRAS = (
    "imagePullSecrets[0].name=pull",
    "server.extraArgs[0]=--scrub-every-s=86400",
    "server.extraEnv[0].name=A",
    "server.extraEnv[0].value=b",
    "server.extraVolumes[0].name=more",
    "server.extraVolumes[0].emptyDir.sizeLimit=1Gi",
    "server.extraVolumeMounts[0].name=more",
    "server.extraVolumeMounts[0].mountPath=/more",
    "podLabels.team=a",
    "podAnnotations.team=a",
    "nodeSelector.disk=fast",
    "priorityClassName=high",
    "serviceAccountName=me",
    "storage.className=fast",
    "podDisruptionBudget.enabled=true",
    "image.digest=sha256:" + 64 * "a",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].key=a",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].operator=Exists",
    "tolerations[0].operator=Exists",
)
RENDERINGS = {
    "plain": (),
    "everything": (*MONITORED, *TLS, *RETENTION, *EXTRAS, "tls.clientCA=true", "server.workers=2"),
    "sidecar": ("mode=sidecar",),
    "sidecar-everything": (
        "mode=sidecar",
        *MONITORED,
        *TLS,
        *RETENTION,
        *EXTRAS,
        "engine.replicas=3",
        "retention.keepUnread=true",
    ),
    "sidecar-without-storage": ("mode=sidecar", "persistence=none"),
    "sidecar-shared": ("mode=sidecar", "sidecar.sharedMemory=true"),
    "deployment": ("mode=deployment", "deployment.store=s3://bucket/rows"),
    "deployment-everything": (
        "mode=deployment",
        "deployment.store=s3://bucket",
        "deployment.replicas=3",
        "retention.bucketBytesMax=1000000000000",
        *MONITORED,
        *TLS,
        *RETENTION,
        *EXTRAS,
    ),
    "sidecar-alone": ("mode=sidecar", "sidecar.listenTcp=false", "tls.enabled=true", "networkPolicy.enabled=false"),
}


def _set(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def _render(name: str, by: str = "helm") -> list[Any]:
    return helm(*_set(*RENDERINGS[name]), by=by)


def _workload(documents: list[Any]) -> Any:
    (found,) = [d for d in documents if d["kind"] in ("StatefulSet", "Deployment")]
    return found


def _server(documents: list[Any]) -> Any:
    (found,) = [c for c in containers_of(pod_of(_workload(documents))) if c["name"] == "slotstream"]
    return found


@pytest.mark.parametrize("by", ["helm", "helm3"])
@pytest.mark.parametrize("name", RENDERINGS)
def test_every_rendering_is_valid_restricted_and_whole(name: str, by: str) -> None:
    documents = _render(name, by)
    assert len({mode_of(document) for document in documents}) == len(documents)
    for document in documents:
        validate(document)
    workload = _workload(documents)
    pod = pod_of(workload)
    assert not list(not_restricted(pod))
    labels = workload["spec"]["template"]["metadata"]["labels"]
    kinds = ("Service", "StatefulSet", "Deployment", "PodDisruptionBudget")
    selectors = [d["spec"]["selector"] for d in documents if d["kind"] in kinds]
    selectors += [d["spec"]["podSelector"] for d in documents if d["kind"] == "NetworkPolicy"]
    for selector in selectors:
        chosen = selector.get("matchLabels", selector)
        assert {"app.kubernetes.io/name", "app.kubernetes.io/instance"} <= chosen.keys()
        assert chosen.items() <= labels.items()
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    assert services[workload["spec"].get("serviceName", "slotstream-pods")]["clusterIP"] == "None"
    ports = {port["name"]: port["containerPort"] for c in containers_of(pod) for port in c.get("ports", ())}
    for spec in services.values():
        assert {port["targetPort"] for port in spec["ports"]} <= ports.keys()
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
    mounted = set()
    for container in containers_of(pod):
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        mounted |= {mount["name"] for mount in container["volumeMounts"]}
        for path in re.findall(r'[="](/[^"\s,]+)', " ".join(container["args"])):
            assert any(Path(path).is_relative_to(mount) for mount in paths), (container["name"], path)
    assert mounted == volumes | claims
    assert not volumes & claims


@pytest.mark.parametrize("name", RENDERINGS)
def test_every_rendering_is_valid_for_the_oldest_kubernetes_that_it_is_for(name: str) -> None:
    oldest = OLDEST_WITH_SIDECARS if name.startswith("sidecar") else OLDEST
    for document in _render(name):
        validate(document, oldest)
    if name == "sidecar":  # An older one does not know an init container that restarts.
        with pytest.raises(ValidationError, match="restartPolicy"):
            validate(_workload(_render(name)), OLDEST)


def test_what_the_chart_makes_kustomize_makes(tmp_path: Path) -> None:
    """But for the labels by which Helm knows its own, and for one policy that kustomize has in two."""

    def plain(documents: list[Any]) -> dict[str, Any]:
        for document in documents:
            for ours in ("app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"):
                document["metadata"]["labels"].pop(ours, None)
        return {mode_of(document): document for document in documents}

    assert plain(kustomize(BASE)) == plain(helm("--set", "networkPolicy.monitoringNamespace="))
    shutil.copytree(BASE, tmp_path / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [kubernetes]\ncomponents: [kubernetes/components/tls, kubernetes/components/prometheus]\n"
    )
    both = plain(kustomize(tmp_path))
    chart = plain(helm(*_set("tls.enabled=true", *MONITORED, "monitoring.podMonitor.enabled=false")))
    policies = [both.pop(f"NetworkPolicy/{name}")["spec"] for name in ("slotstream", "slotstream-metrics")]
    assert [rule for policy in policies for rule in policy["ingress"]] == chart.pop("NetworkPolicy/slotstream")["spec"][
        "ingress"
    ]
    for found in (both, chart):  # Their order says nothing.
        for key in ("volumes", "containers"):
            pod = pod_of(found["StatefulSet/slotstream"])
            pod[key].sort(key=lambda item: item["name"])
        (container,) = pod["containers"]
        container["args"].sort()
        container["volumeMounts"].sort(key=lambda item: item["name"])
    assert both == chart


def _config(container: Any, directory: Path) -> ServerConfig:
    """What the server makes of the container's arguments, with files that are there."""
    pair = Authority(directory).issue("server")
    files = {
        "/tokens/tokens.toml": write_tokens(directory / "tokens.toml", entry("alice", ["default"], "read")),
        "/tls/tls.crt": pair.cert,
        "/tls/tls.key": pair.key,
        "/tls/ca.crt": directory / "ca.pem",
        "/retention/retention.toml": directory / "retention.toml",
    }
    arguments = [re.sub(r"=(/\S+)", lambda found: f"={files.get(found[1], found[1])}", word) for word in container["args"]]
    assert arguments[0] == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments[1:]))


@pytest.mark.parametrize("name", RENDERINGS)
def test_the_servers_arguments_are_the_servers_and_its_pod_waits_for_its_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("deployment"):  # The Secret has it.
        monkeypatch.setenv("SLOTSTREAM_SERVE_CATALOGUE", "postgresql://slotstream:secret@db/slotstream")
    documents = _render(name)
    container, pod = _server(documents), pod_of(_workload(documents))
    rules = [d for d in documents if d["metadata"]["name"].endswith("-retention")]
    if rules:
        (tmp_path / "retention.toml").write_text(rules[0]["data"]["retention.toml"])
    config = _config(container, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listens = [*config.addresses, config.metrics_listen, config.probes_listen]
    tcp = [int(listen.rpartition(":")[2]) for listen in listens if listen is not None and not listen.startswith("unix:")]
    assert sorted(ports.values()) == sorted(tcp)
    assert config.tokens_file is not None
    assert (config.tls_cert is not None) == ("tls" in {volume["name"] for volume in pod["volumes"]})
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in container:
            assert container[probe]["httpGet"]["port"] == "probes"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    grace = pod["terminationGracePeriodSeconds"]
    assert grace > config.drain_s + _STOP_S + _LAST_CALLS_S
    if rules:
        read = "sidecar" in name
        assert config.retention == Policy(
            default=Rule(delete_when_full=not read, delete_read_when_full=read, failed_age_s_max=604800),
            free_bytes_target=53687091200,
            bucket_bytes_max=10**12 if name.startswith("deployment") else 0,
        )


def test_equal_servers_over_a_bucket() -> None:
    documents = _render("deployment")
    workload = _workload(documents)
    assert (workload["kind"], workload["spec"]["replicas"]) == ("Deployment", 2)
    pod = pod_of(workload)
    (migrate,), (server,) = pod["initContainers"], pod["containers"]
    assert migrate["args"] == ["migrate"]
    secret = {"secretRef": {"name": "slotstream-store"}}
    assert migrate["envFrom"] == server["envFrom"] == [secret]
    assert "--store=s3://bucket/rows" in server["args"]
    assert not [word for word in server["args"] if "postgresql" in word or word.startswith("--data")]
    (scratch,) = [volume for volume in pod["volumes"] if volume["name"] == "scratch"]
    assert scratch["emptyDir"] == {"sizeLimit": "50Gi"}
    assert one(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert one(documents, "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]  # It calls a bucket and a database.
    names = one(_render("deployment-everything"), "Certificate")["spec"]["dnsNames"]
    assert {"slotstream", "slotstream-pods"} <= set(names)
    assert "initContainers" not in pod_of(_workload(helm(*_set(*RENDERINGS["deployment"], "deployment.migrate=false"))))


@pytest.mark.parametrize("name", [name for name in RENDERINGS if name.startswith("sidecar")])
def test_the_sidecar(name: str, tmp_path: Path) -> None:
    documents = _render(name)
    workload = _workload(documents)
    pod = pod_of(workload)
    (sidecar,) = pod["initContainers"]
    (engine,) = pod["containers"]
    assert sidecar["restartPolicy"] == "Always"  # So that engines start after it is ready, and end before it.
    assert sidecar["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert "readinessProbe" not in sidecar  # It would take the engine out of its Service.
    sockets = [c["name"] for c in containers_of(pod) for m in c["volumeMounts"] if m["name"] == "socket"]
    assert sockets == ["slotstream", "vllm"]
    (socket,) = [volume for volume in pod["volumes"] if volume["name"] == "socket"]
    assert "emptyDir" in socket
    extra = transfer_config(engine["args"])["kv_connector_extra_config"]
    (tmp_path / "token").write_text(token("vllm"))
    options = ConnectorOptions.from_extra({**extra, "token_file": str(tmp_path / "token")})
    assert f"--listen={options.server}" in sidecar["args"]
    assert "--socket-mode" not in " ".join(sidecar["args"])  # 0600, its default.
    shared = name == "sidecar-shared"
    assert pod.get("shareProcessNamespace", False) == shared
    assert ("--transport=shared" in sidecar["args"], options.transport) == (shared, "auto" if shared else "grpc")
    # The engine's own, the server's drain, and 30 s.
    assert pod["terminationGracePeriodSeconds"] == 60 + 10 + 30
    # Of its 60 s preStop takes 5, and vLLM ends its requests in all but 15 of the rest.
    assert "--shutdown-timeout=40" in engine["args"]
    claims = workload["spec"].get("volumeClaimTemplates", [])
    assert [claim["metadata"]["name"] for claim in claims] == ([] if name == "sidecar-without-storage" else ["data"])
    env = {item["name"]: item["value"] for item in engine["env"]}
    assert {"HOME", "HF_HOME", "VLLM_CACHE_ROOT"} <= env.keys()
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert mounts["cache"] == env["HOME"]
    assert engine["lifecycle"]["preStop"]
    http = one(documents, "Service", "slotstream")["spec"]["ports"]
    assert 8000 in [port["port"] for port in http]


SECRET = "s3cret-that-nobody-may-see"


@pytest.mark.parametrize(
    "value",
    [
        f"engine.extraArgs[0]=--api-key={SECRET}",
        f"engine.extraArgs[0]=--hf-token={SECRET}",
        f"server.extraArgs[0]=--token={SECRET}",
        f"engine.connector.token={SECRET}",
        "engine.connector.server=elsewhere:1",
        "mode=daemonset",
        "persistence=maybe",
        "storage.accessModes[0]=ReadWriteMany",
        "server.workers=0",
        "server.drainSeconds=-1",
        "image.digest=latest",
        "runAsUser=0",
        "tokens.token=abc",
        "unknown=1",
    ],
)
@pytest.mark.parametrize("by", ["helm", "helm3"])
def test_the_schema_refuses_what_cannot_be_and_secrets_in_arguments(value: str, by: str) -> None:
    said = run_tool(by, "template", "r", str(CHART), "--set", value, status=None)
    assert "schema" in said, said
    assert "apiVersion" not in said


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (("persistence=none",), "is for mode: sidecar"),
        (("mode=deployment",), "deployment.store is missing"),
        ((*RENDERINGS["deployment"], "server.workers=2"), "more servers take deployment.replicas"),
        ((*RENDERINGS["deployment"], *RETENTION), "how much it may hold"),
        (("mode=sidecar", "server.workers=2"), "only one process can listen on the engine's socket"),
        (("tls.enabled=true", "tls.certManager.enabled=true"), "which issuer signs"),
        ((*TLS, "tls.enabled=false"), "set tls.enabled too"),
    ],
)
def test_values_that_contradict_each_other_are_one_sentence(values: tuple[str, ...], why: str) -> None:
    assert why in run_tool("helm", "template", "r", str(CHART), *_set(*values), status=None)


def test_the_sidecar_says_which_kubernetes_it_needs() -> None:
    old = ("template", "r", str(CHART), "--kube-version", "1.28.0")
    assert "needs Kubernetes 1.29 or later" in run_tool("helm", *old, "--set", "mode=sidecar", status=None)
    assert "kind: StatefulSet" in run_tool("helm", *old)


@pytest.mark.parametrize("by", ["helm", "helm3"])
def test_lint_finds_nothing(by: str) -> None:
    for name in RENDERINGS:
        assert "0 chart(s) failed" in run_tool(by, "lint", "--strict", str(CHART), *_set(*RENDERINGS[name]))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (("mode=sidecar", "persistence=none"), {"Rows end with their pod": True, "vllm-capture-token": True}),
        (
            RENDERINGS["deployment"],
            {"--from-env-file=store.env": True, "slotstream-pods:50151": True, "deployment/r-slotstream": True},
        ),
        (("mode=sidecar",), {"Rows end with their pod": False, "Nothing is deleted": True}),
        (
            ("tls.enabled=true", "retention.enabled=true"),
            {"in the clear": False, "Nothing is deleted": False, "--tls-ca": True},
        ),
        ((), {"in the clear": True, "curl -s localhost:9465/readyz": True, "slotstream ls": True}),
    ],
)
def test_the_notes_say_how_to_test_it_and_what_ends_with_the_pod(values: tuple[str, ...], says: dict[str, bool]) -> None:
    """By Helm 4: an older one asks a cluster first."""
    text = run_tool("helm", "install", "r", str(CHART), "--dry-run=client", *_set(*values))
    notes = text.partition("NOTES:")[2]
    assert notes
    assert {sentence: sentence in notes for sentence in says} == says


def test_a_chart_of_ones_own_includes_the_sidecar(tmp_path: Path) -> None:
    """Its engine is its own; the sidecar, its volumes and the connector's options come from here."""
    (tmp_path / "charts").mkdir()
    shutil.copytree(CHART, tmp_path / "charts" / "slotstream")
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: mine\nversion: 1.0.0\n")
    values = {"slotstream": {"mode": "sidecar", "workload": False, "persistence": "none", "fullnameOverride": "mine"}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "templates").mkdir()
    readme = (ROOT / "docs" / "kubernetes.md").read_text()
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", readme, re.S) if "slotstream.sidecar" in block]
    (tmp_path / "templates" / "engine.yaml").write_text(example)
    documents = helm(chart=tmp_path, release="mine")
    for document in documents:
        validate(document)
    pod = pod_of(one(documents, "Deployment"))
    whole = pod_of(_workload(helm("--set", "mode=sidecar,persistence=none")))
    assert pod["initContainers"] == whole["initContainers"]
    assert pod["terminationGracePeriodSeconds"] == whole["terminationGracePeriodSeconds"]
    (engine,), (ours,) = pod["containers"], whole["containers"]
    assert transfer_config(engine["args"]) == transfer_config(ours["args"])
    assert not list(not_restricted(pod))
    assert "StatefulSet" not in {document["kind"] for document in documents}
    selector = one(documents, "Service", "mine-pods")["spec"]["selector"]
    assert selector.items() <= one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"].items()


def test_the_chart_is_of_the_projects_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert [chart["version"], chart["appVersion"]] == project * 2


def test_every_value_has_its_schema_and_its_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def same(said: Any, known: Any, where: str) -> None:
        if "properties" in known and isinstance(said, dict):
            assert said.keys() == known["properties"].keys() - {"global"}, where
            for name, value in said.items():
                same(value, known["properties"][name], f"{where}.{name}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for issuer in (values["tls"]["certManager"]["issuerRef"],):
        issuer.setdefault("group", "")  # May be left out.
    same(values, schema, "values")
