"""The values that put slotstream beside others' engines: valid by the schemas of their charts, and right by our own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.manifests import ROOT, SCHEMAS, helm, not_restricted, one, pod_of, transfer_config
from support.secure import token

from slotstream.connector.options import ConnectorOptions

VALUES = ROOT / "deploy" / "values"


def _values(name: str) -> Any:
    return yaml.safe_load((VALUES / f"{name}.yaml").read_text())


def _options(arguments: list[str], directory: Path) -> ConnectorOptions:
    (directory / "token").write_text(token("vllm"))
    transfer = transfer_config(arguments)
    assert transfer["kv_connector"] == "SlotStreamConnector"
    return ConnectorOptions.from_extra({**transfer["kv_connector_extra_config"], "token_file": str(directory / "token")})


@pytest.mark.parametrize(("name", "schema"), [("production-stack", "production-stack"), ("llm-d", "llm-d-modelservice")])
def test_the_values_are_valid_by_the_charts_schema(name: str, schema: str) -> None:
    known = json.loads((SCHEMAS / f"{schema}.values.schema.json").read_text())
    values = _values(name)
    jsonschema.validate(values, known)
    # What the schema does not name it lets pass: each key that we set must be one that it names.
    unnamed = list(_unnamed(values, known, name))
    assert not unnamed
    broken = {"servingEngineSpec": {"modelSpec": 1}, "decode": {"containers": 1}}
    for key, wrong in broken.items():
        if key in values:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**values, key: {**values[key], **wrong}}, known)


def _unnamed(value: Any, schema: Any, where: str) -> Any:
    if isinstance(value, dict) and isinstance(schema.get("properties"), dict):
        for key, inner in value.items():
            if key not in schema["properties"]:
                yield f"{where}.{key}"
            else:
                yield from _unnamed(inner, schema["properties"][key], f"{where}.{key}")
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for inner in value:
            yield from _unnamed(inner, schema["items"], f"{where}[]")


def test_llm_d_has_the_sidecar_that_the_chart_makes(tmp_path: Path) -> None:
    decode = _values("llm-d")["decode"]
    pod = pod_of(one(helm("--set", "mode=sidecar,persistence=none"), "StatefulSet"))
    # Their chart has neither a securityContext nor a group for the pod: each container says who it is, and reads what all may.
    (sidecar,) = pod["initContainers"]
    whole = {key: value for key, value in pod["securityContext"].items() if not key.startswith("fsGroup")}
    sidecar["securityContext"] |= whole
    for volume in pod["volumes"]:
        if "secret" in volume:
            volume["secret"]["defaultMode"] = 0o444
    assert decode["initContainers"] == [sidecar]
    (engine,) = decode["containers"]
    assert f"--listen={_options(engine['args'], tmp_path).server}" in decode["initContainers"][0]["args"]
    volumes = {volume["name"]: volume for volume in decode["volumes"]}
    assert volumes == {volume["name"]: volume for volume in pod["volumes"] if volume["name"] in volumes}
    mounted = {m["name"] for c in (*decode["initContainers"], engine) for m in c["volumeMounts"]}
    assert mounted == volumes.keys()
    security = pod["securityContext"]
    assert engine["securityContext"]["runAsUser"] == security["runAsUser"]  # Else the socket is not its own.
    assert not list(not_restricted({"initContainers": decode["initContainers"], "containers": [engine]}))


def test_production_stack_sends_to_the_server_of_the_chart(tmp_path: Path) -> None:
    spec = _values("production-stack")["servingEngineSpec"]
    (model,) = spec["modelSpec"]
    options = _options(model["vllmConfig"]["extraArgs"], tmp_path)
    documents = helm()
    service = one(documents, "Service", "slotstream")
    assert options.server in {f"slotstream:{port['port']}" for port in service["spec"]["ports"]}
    policy = one(documents, "NetworkPolicy")
    for peer in policy["spec"]["ingress"][0]["from"]:
        assert peer["podSelector"]["matchLabels"].items() <= spec["labels"].items()
    assert "podLabels" not in model  # The chart writes both into one mapping.
    mounts = {mount["name"]: mount["mountPath"] for mount in model["extraVolumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in model["extraVolumes"]}
    assert options.spool_dir == mounts["slotstream-spool"]
