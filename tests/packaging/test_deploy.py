"""What `deploy/` says to Docker, Kubernetes and Prometheus is what the code takes, serves and counts."""

from __future__ import annotations

import argparse
import copy
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.manifests import kustomize, not_restricted, validate
from support.secure import Authority, entry, token, write_tokens
from support.server import run_cli

from slotstream.cli.serve_arguments import add_serve_arguments, config_from_arguments
from slotstream.client import connect
from slotstream.connector.counters import METRICS
from slotstream.connector.options import ConnectorOptions
from slotstream.server.access.tokens import load_tokens
from slotstream.server.app import _LAST_CALLS_S
from slotstream.server.config import ServerConfig
from slotstream.server.metrics import Metrics
from slotstream.server.processes.workers import _STOP_S
from slotstream.store.samples import SampleStore
from slotstream.wire import errors

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [DEPLOY / "README.md", ROOT / "docs" / "kubernetes.md"]
README = "".join(page.read_text() for page in PAGES)
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
_BYTES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def _documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def _nbytes(quantity: str) -> int:
    return int(quantity[:-2]) * _BYTES[quantity[-2:]]


def _patched(document: Any, patch: Path) -> Any:
    """`document` after a JSON patch of adds and removes, as kustomize applies it."""
    document = copy.deepcopy(document)
    for step in yaml.safe_load(patch.read_text()):
        *way, last = step["path"].removeprefix("/").split("/")
        at = document
        for name in way:
            at = at[int(name) if isinstance(at, list) else name]
        match step["op"], at:
            case "add", list():
                assert last == "-"
                at.append(step["value"])
            case "add", dict():
                assert last not in at
                at[last] = step["value"]
            case "remove", dict():
                del at[last]
            case _:
                raise AssertionError(step)
    return document


PLAIN = yaml.safe_load((BASE / "statefulset.yaml").read_text())
WITH_TLS = _patched(PLAIN, BASE / "components" / "tls" / "statefulset-patch.yaml")
SERVERS = [pytest.param(PLAIN, id="plain"), pytest.param(WITH_TLS, id="tls")]
(_ENGINE,) = [d for d in _documents(BASE / "examples" / "vllm.yaml") if d["kind"] == "StatefulSet"]


def _pod(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def _container(workload: Any) -> Any:
    (container,) = _pod(workload)["containers"]
    return container


def _probes(container: Any) -> dict[str, Any]:
    return {name: container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}


def _files(directory: Path) -> dict[str, str]:
    """What the server finds at the paths that the manifests name: tokens and a certificate."""
    pair = Authority(directory).issue("server")
    return {
        "/data": str(directory / "data"),
        "/tokens/tokens.toml": str(write_tokens(directory / "tokens.toml", entry("alice", ["default"], "read"))),
        "/tls/tls.crt": str(pair.cert),
        "/tls/tls.key": str(pair.key),
    }


def _arguments(workload: Any, files: dict[str, str], ports: dict[str, str]) -> list[str]:
    """The container's own arguments; only paths, and ports where `ports` says so, are the test's."""
    arguments = []
    for argument in _container(workload)["args"]:
        flag, equals, value = argument.partition("=")
        arguments.append(flag + equals + files.get(value, ports.get(flag, value)))
    return arguments


def _parse(arguments: list[str]) -> ServerConfig:
    assert arguments[0] == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_serve_arguments(parser)
    parsed, unknown = parser.parse_known_args(arguments[1:])
    assert not unknown
    return config_from_arguments(parsed)


# A chart's templates are YAML only once they are rendered: test_chart.py.
_MANIFESTS = [path for path in sorted(DEPLOY.rglob("*.yaml")) if path.parent.name != "templates"]


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(DEPLOY))) for p in _MANIFESTS])
def test_every_manifest_parses(path: Path) -> None:
    assert all(document for document in _documents(path))


@pytest.mark.parametrize("path", [pytest.param(p.parent, id=p.parent.name) for p in sorted(BASE.rglob("kustomization.yaml"))])
def test_a_kustomization_names_the_files_beside_it(path: Path) -> None:
    said = yaml.safe_load((path / "kustomization.yaml").read_text())
    named = {*said.get("resources", ()), *(patch["path"] for patch in said.get("patches", ()))}
    assert named == {file.name for file in path.glob("*.yaml")} - {"kustomization.yaml"}


# The server.


@pytest.mark.parametrize("workload", SERVERS)
def test_the_arguments_are_the_servers_and_fit_their_pod(workload: Any, tmp_path: Path) -> None:
    config = _parse(_arguments(workload, _files(tmp_path), {}))
    container, pod = _container(workload), _pod(workload)
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert config.metrics_listen is not None
    assert config.probes_listen is not None
    listens = {"grpc": config.listen, "metrics": config.metrics_listen, "probes": config.probes_listen}
    assert ports == {name: listen.rpartition(":")[2] for name, listen in listens.items()}
    assert pod["terminationGracePeriodSeconds"] > config.drain_s + _STOP_S + _LAST_CALLS_S
    limit = _nbytes(container["resources"]["limits"]["memory"])
    assert limit >= 2 * (config.workers * config.ingest_bytes_max + (256 << 20))
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    assert _nbytes(claim["spec"]["resources"]["requests"]["storage"]) > 100 * config.free_bytes_min


@pytest.mark.parametrize("workload", [*SERVERS, pytest.param(_ENGINE, id="vllm")])
def test_what_is_mounted_is_there(workload: Any) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in _container(workload)["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
    assert mounts.keys() == {volume["name"] for volume in _pod(workload)["volumes"]} | claims
    assert workload["spec"]["selector"]["matchLabels"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    paths = set(re.findall(r'[="](/[^"\s]+)', "\n".join(_container(workload)["args"])))
    assert paths
    for path in paths:
        assert any(Path(path).is_relative_to(mount) for mount in mounts.values()), path


def test_a_secret_as_kubernetes_mounts_it_is_taken(tmp_path: Path) -> None:
    """With fsGroup a Secret's file is readable for its group, which the server allows for digests only."""
    pod = _pod(PLAIN)
    (mode,) = [volume["secret"]["defaultMode"] for volume in pod["volumes"] if volume["name"] == "tokens"]
    path = Path(_files(tmp_path)["/tokens/tokens.toml"])
    path.chmod(mode | 0o440 if "fsGroup" in pod["securityContext"] else mode)
    assert len(load_tokens(path)) == 1


@pytest.mark.parametrize("workload", SERVERS)
def test_a_server_with_these_arguments_answers_its_probes_and_stops_in_time(workload: Any, tmp_path: Path) -> None:
    files = _files(tmp_path)
    tls: dict[str, Any] = {"tls_ca": str(tmp_path / "ca.pem")} if workload is WITH_TLS else {}
    free = dict.fromkeys(("--listen", "--metrics", "--probes"), "0.0.0.0:0")
    with _serving(_arguments(workload, files, free)) as (process, ports):
        probes = _probes(_container(workload))
        for name, probe in probes.items():
            _answer(name, probe, ports)
        address = f"127.0.0.1:{ports['grpc']}"
        with connect(address, token=token("alice"), **tls) as client:
            assert list(client.list()) == []
        (tmp_path / "token").write_text(token("alice"))
        access = ["--token-file", str(tmp_path / "token"), *(["--tls-ca", tls["tls_ca"]] if tls else [])]
        listed = run_cli("ls", "--server", address, *access)
        assert listed.returncode == 0, listed.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(_pod(workload)["terminationGracePeriodSeconds"]) == 0
    assert (tmp_path / "data" / "catalog.sqlite").exists()


@contextmanager
def _serving(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A server with these arguments, and its ports by the names that the container gives them."""
    command = [sys.executable, "-m", "slotstream.cli.main", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if "listening on" in line:
                    break
            where = r"probes on http://\S+:(\d+)/[\s\S]*metrics on http://\S+:(\d+)/metrics[\s\S]*listening on \S+:(\d+)"
            found = re.search(where, said)
            assert found is not None, said
            yield process, {"probes": int(found[1]), "metrics": int(found[2]), "grpc": int(found[3])}
        finally:
            process.kill()


def _answer(name: str, probe: Any, ports: dict[str, int]) -> None:
    """Ask as the kubelet does: over HTTP without TLS, also where everything else is TLS."""
    where = f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
    with urllib.request.urlopen(where, timeout=30.0) as answer:
        assert answer.read().decode() == "ok", name


@pytest.mark.parametrize("overlay", ["", "components: [kubernetes/components/tls, kubernetes/components/prometheus]\n"])
def test_what_kustomize_makes_is_valid_and_restricted(tmp_path: Path, overlay: str) -> None:
    shutil.copytree(BASE, tmp_path / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text("resources: [kubernetes]\n" + overlay)
    made = kustomize(tmp_path)
    for document in made:
        validate(document)
    (workload,) = [document for document in made if document["kind"] == "StatefulSet"]
    assert not list(not_restricted(_pod(workload)))


def test_the_engine_example_is_valid() -> None:
    for document in _documents(BASE / "examples" / "vllm.yaml"):
        validate(document)


def test_services_and_policies_find_the_pods() -> None:
    labels = PLAIN["spec"]["template"]["metadata"]["labels"]
    names = {port["name"] for port in _container(PLAIN)["ports"]}
    (service,) = _documents(BASE / "service.yaml")
    (headless,) = _documents(BASE / "service-pods.yaml")
    assert headless["metadata"]["name"] == PLAIN["spec"]["serviceName"]
    assert headless["spec"]["clusterIP"] == "None"
    for found in (service, headless):
        assert found["spec"]["selector"] == labels == PLAIN["spec"]["selector"]["matchLabels"]
        assert {port["targetPort"] for port in found["spec"]["ports"]} == names - {"probes"}
    let_in = set()
    for path in (BASE / "networkpolicy.yaml", BASE / "components" / "prometheus" / "networkpolicy.yaml"):
        (policy,) = _documents(path)
        assert policy["spec"]["podSelector"]["matchLabels"] == labels
        let_in |= {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert let_in == names - {"probes"}  # They come from the node.
    (monitor,) = _documents(BASE / "components" / "prometheus" / "servicemonitor.yaml")
    chosen = [
        s for s in (service, headless) if monitor["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()
    ]
    assert chosen == [headless]  # One of the two: each pod is asked once.
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= {p["name"] for p in headless["spec"]["ports"]}


def test_kustomize_makes_of_it_what_these_tests_look_at(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "kubernetes")
    (overlay,) = [block for block in re.findall(r"```yaml\n(.*?)```", README, re.S) if "kind: Kustomization" in block]
    made = yaml.safe_load(overlay)
    made["resources"] = ["../kubernetes"]
    made["components"] = [f"../kubernetes/components/{Path(c).name}" for c in made["components"]]
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "kustomization.yaml").write_text(yaml.safe_dump(made))
    found = {(document["kind"], document["metadata"]["name"]): document for document in kustomize(tmp_path / "overlay")}
    kinds = {"StatefulSet", "Service", "NetworkPolicy", "ServiceMonitor", "PrometheusRule", "ConfigMap"}
    assert {kind for kind, _ in found} == kinds
    pod = _pod(found["StatefulSet", "slotstream"])
    image = pod["containers"][0].pop("image")
    assert image.startswith("registry.example.com/")
    expected = copy.deepcopy(_pod(WITH_TLS))
    del expected["containers"][0]["image"]
    assert pod == expected


# The engine.


def _json_after(words: list[str], flag: str) -> Any:
    return json.loads(words[words.index(flag) + 1])


def test_the_engines_arguments_are_those_of_the_readme_and_its_options_the_connectors(tmp_path: Path) -> None:
    arguments = _container(_ENGINE)["args"]
    (example,) = re.findall(r"^vllm serve .*?\n\n|^vllm serve .*?(?=```)", (ROOT / "README.md").read_text(), re.S | re.M)[:1]
    readme = shlex.split(example)
    assert arguments[0] == readme[2]
    transfer, documented = (_json_after(words, "--kv-transfer-config") for words in (arguments, readme))
    extra = transfer.pop("kv_connector_extra_config")
    assert extra["layers"] == documented.pop("kv_connector_extra_config")["layers"]
    assert transfer == documented
    (tmp_path / "token").write_text(token("vllm"))
    (volume,) = [v for v in _pod(_ENGINE)["volumes"] if v["name"] == "token"]
    assert f"create secret generic {volume['secret']['secretName']} --from-file={Path(extra['token_file']).name}=" in README
    options = ConnectorOptions.from_extra({**extra, "token_file": str(tmp_path / "token")})
    (service,) = _documents(BASE / "service.yaml")
    assert options.server in {f"{service['metadata']['name']}:{port['port']}" for port in service["spec"]["ports"]}
    (claim,) = _ENGINE["spec"]["volumeClaimTemplates"]
    assert _nbytes(claim["spec"]["resources"]["requests"]["storage"]) > options.spool_bytes_max


def test_the_engine_carries_the_label_that_lets_it_in() -> None:
    (policy,) = _documents(BASE / "networkpolicy.yaml")
    labels = _ENGINE["spec"]["template"]["metadata"]["labels"]
    (rule,) = policy["spec"]["ingress"]
    assert all(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in rule["from"])


# The images.


def _instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if line and not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole)]


def test_the_image_runs_the_server_as_the_pod_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said = dict(_instructions(DEPLOY / "Dockerfile"))
    assert json.loads(said["ENTRYPOINT"]) == list(PROJECT["scripts"])
    context = _pod(PLAIN)["securityContext"]
    assert said["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert said["EXPOSE"].split() == [str(port["containerPort"]) for port in _container(PLAIN)["ports"]]
    with pytest.raises(errors.ConfigError, match="give --tokens"):
        _parse(json.loads(said["CMD"]))
    assert _parse([*json.loads(said["CMD"]), "--allow-anonymous"]).data_dir == Path("/data")


def test_versions_are_those_of_the_project() -> None:
    for workload in (PLAIN, _ENGINE):
        assert _container(workload)["image"].endswith(":" + PROJECT["version"])
    for path in (DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.vllm", DEPLOY / "README.md"):
        images = re.findall(r"slotstream(?:-vllm)?:(\d+\.[\d.]+)", path.read_text())
        assert images
        assert set(images) == {PROJECT["version"]}
    (vllm,) = [rest for word, rest in _instructions(DEPLOY / "Dockerfile.vllm") if rest.startswith("VLLM_VERSION=")]
    assert f"vLLM {vllm.partition('=')[2]}," in (ROOT / "docs" / "records" / "compatibility.md").read_text()
    (nixl,) = PROJECT["optional-dependencies"]["nixl"]
    assert f'"{nixl}"' in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.wheel
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_what_an_image_copies_makes_a_whole_wheel(name: str, tmp_path: Path) -> None:
    """The build of the image, as far as it goes without Docker."""
    source = tmp_path / "source"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for word, rest in _instructions(DEPLOY / name):
        if word == "COPY" and not rest.startswith("--from"):
            *paths, target = rest.split()
            for path in paths:
                if (ROOT / path).is_dir():
                    shutil.copytree(ROOT / path, source / target, ignore=ignore)
                else:
                    shutil.copy(ROOT / path, source / target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("slotstream-*.whl")
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))
    code = "import slotstream.server.app, slotstream.connector.options as c; print(c.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert Path(found.stdout.strip()).is_relative_to(installed)


# Alerts.


def _series(tmp_path: Path) -> set[str]:
    """Every name that a server or an engine's connector shows in /metrics."""
    store = SampleStore.open(tmp_path)
    try:
        families = list(Metrics(store).registry.collect())
    finally:
        store.close()
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    server = {family.name + suffix for family in families for suffix in suffixes[family.type]}
    return server | {f"slotstream_connector_{m.name}{suffixes[m.kind][0]}" for m in METRICS}


def test_alerts_ask_for_metrics_labels_and_codes_that_exist(tmp_path: Path) -> None:
    known = _series(tmp_path)
    codes = {kind.code for name in errors.__all__ if (kind := getattr(errors, name)) and hasattr(kind, "code")}
    (service,) = _documents(BASE / "service.yaml")
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 10
    for rule in rules:
        expression = rule["expr"]
        names = set(re.findall(r"\b(?:slotstream|vllm)[_:]\w+", expression))
        assert names or "up{" in expression, rule
        assert names <= known | {"vllm:generation_tokens_total"}, rule  # vLLM's own: `engine/test_dense.py` asks it.
        for label, value in re.findall(r'(\w+)[=!]~?"([^"]*)"', expression):
            allowed = {"code": codes, "outcome": {"committed", "duplicate", "failed"}, "job": {service["metadata"]["name"]}}
            allowed["state"] = {"arriving", "ended", "late"}
            assert set(value.split("|")) <= allowed[label], rule
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary"}


def test_a_directory_that_is_gone_takes_the_series_with_it_that_its_alert_looks_for(tmp_path: Path) -> None:
    (rule,) = [rule for group in RULES["groups"] for rule in group["rules"] if rule["alert"] == "SlotstreamStoreGone"]
    assert "unless on (job, instance) slotstream_free_bytes" in rule["expr"]
    store = SampleStore.open(tmp_path / "data")
    try:
        registry = Metrics(store).registry
        assert "slotstream_free_bytes" in {family.name for family in registry.collect()}
        (tmp_path / "data").rename(tmp_path / "away")
        assert "slotstream_free_bytes" not in {family.name for family in registry.collect()}
        (tmp_path / "away").rename(tmp_path / "data")
    finally:
        store.close()


# The README.


def test_the_readme_fits_two_screens() -> None:
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 100
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == ["Install", "Sidecar or StatefulSet", "Upgrade", "Backup", "Rotate a token"]


def test_the_readme_names_files_options_and_commands_that_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / path).exists(), path
    for path in re.findall(r"\bdeploy/[\w./-]+\w", README):
        assert (ROOT / path).exists(), path
    for alert in re.findall(r"`(Slotstream[A-Z]\w+)`", README):
        assert any(rule["alert"] == alert for group in RULES["groups"] for rule in group["rules"]), alert
    for command in re.findall(r"^slotstream (\w+)", README, re.M):
        assert run_cli(command, "--help").returncode == 0, command


def test_the_component_holds_the_rules_and_the_dashboard() -> None:
    command = [sys.executable, str(ROOT / "tests" / "regenerate_manifests.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (rule,) = _documents(BASE / "components" / "prometheus" / "prometheusrule.yaml")
    assert rule["spec"] == RULES


# Each defect that these manifests once had.


def test_liveness_asks_for_what_a_restart_mends_and_readiness_for_the_disk_with_tls_too() -> None:
    for workload in (PLAIN, WITH_TLS):
        paths = {name: probe["httpGet"]["path"] for name, probe in _probes(_container(workload)).items()}
        assert paths == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}


def test_the_engine_example_can_have_a_second_pod_is_restricted_and_is_found() -> None:
    documents = _documents(BASE / "examples" / "vllm.yaml")
    pod = _pod(_ENGINE)
    assert not [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]  # One claim for all pods.
    assert not list(not_restricted(pod))
    assert _container(_ENGINE)["lifecycle"]["preStop"]
    services = [d for d in documents if d["kind"] == "Service"]
    assert {s["spec"].get("clusterIP") for s in services} == {None, "None"}
    labels = _ENGINE["spec"]["template"]["metadata"]["labels"]
    for service in services:
        assert service["spec"]["selector"].items() <= labels.items()
        assert [port["port"] for port in service["spec"]["ports"]] == [8000]
    assert _ENGINE["spec"]["serviceName"] in {s["metadata"]["name"] for s in services if s["spec"].get("clusterIP") == "None"}
    env = {entry["name"]: entry["value"] for entry in _container(_ENGINE)["env"]}
    mounts = {mount["mountPath"] for mount in _container(_ENGINE)["volumeMounts"]}
    assert "/cache" in mounts
    assert all(Path(value).is_relative_to("/cache") for name, value in env.items() if name != "USER")


def test_what_selects_pods_names_the_instance() -> None:
    for document in (d for path in BASE.rglob("*.yaml") for d in _documents(path) if isinstance(d, dict)):
        spec = document.get("spec", {})
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if selector:
                assert "app.kubernetes.io/instance" in selector.get("matchLabels", selector), (document["kind"], selector)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_an_image_is_pinned_without_root_and_looked_after(name: str) -> None:
    said = _instructions(DEPLOY / name)
    defaults = dict(rest.split("=", 1) for word, rest in said if word == "ARG")
    for word, rest in said:
        if word == "FROM":
            (argument,) = re.findall(r"^\$\{(\w+)\}", rest)
            assert re.search(r":v?(\d+\.\d+\.\d+|\$\{VLLM_VERSION\})", defaults[argument]), rest
    last = dict(said)  # The last of each: what the image that is made says.
    assert last["USER"] == "10001:10001"
    assert "HEALTHCHECK" in last
    for word, rest in said:
        assert word != "ADD", "it would take what the network has today"
        assert "latest" not in rest
