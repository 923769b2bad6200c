"""What is installed can move: what Kubernetes lets nobody change in place, between the first manifests and these."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.manifests import helm, kustomize, mode_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "deploy" / "README.md").read_text()
FIRST = "a3e9c63"
# What the API server refuses to change in an object that is there.
_CHANGEABLE = {"replicas", "template", "updateStrategy", "minReadySeconds", "ordinals", "persistentVolumeClaimRetentionPolicy"}


def _fixed(document: Any) -> dict[str, Any]:
    """Field -> value of what cannot be changed in place."""
    spec = document.get("spec", {})
    if document["kind"] == "StatefulSet":
        return {f"spec.{name}": value for name, value in spec.items() if name not in _CHANGEABLE}
    if document["kind"] == "Service":
        return {"spec.clusterIP": spec.get("clusterIP", "given by the cluster")}
    return {}


def _first(tmp_path: Path) -> list[Any]:
    """What kustomize makes of the first manifests, out of git's history."""
    archive = subprocess.run(["git", "archive", FIRST, "deploy/kubernetes"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(tmp_path)], input=archive, check=True)
    return kustomize(tmp_path / "deploy" / "kubernetes")


def _named(document: str) -> list[str]:
    """The fields that the README's steps say are different."""
    return re.findall(rf"^\| `{re.escape(document)}` \| `([\w.]+)` \|", README, re.M)


@pytest.mark.parametrize("now", ["kustomize", "helm"])
def test_each_field_that_cannot_be_changed_in_place_is_the_same_or_in_the_steps(now: str, tmp_path: Path) -> None:
    before = {mode_of(document): document for document in _first(tmp_path)}
    after = kustomize(ROOT / "deploy" / "kubernetes") if now == "kustomize" else helm("--set", "fullnameOverride=slotstream")
    there = {mode_of(document): document for document in after}
    changed = {}
    for name, document in before.items():
        assert name in there, f"{name} is gone"
        old, new = _fixed(document), _fixed(there[name])
        if fields := sorted(field for field in old.keys() | new.keys() if old.get(field) != new.get(field)):
            changed[name] = fields
    assert changed == {name: sorted(_named(name)) for name in before if _named(name)}
    # A claim is found by its template's name and its StatefulSet's: it must stay what it was.
    assert "StatefulSet/slotstream" in changed
    assert "spec.volumeClaimTemplates" not in changed["StatefulSet/slotstream"]
    assert there["StatefulSet/slotstream"]["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "data"


def test_the_steps_delete_what_cannot_be_changed_and_no_claim() -> None:
    (section,) = re.findall(r"^## Upgrade$(.*?)^## ", README, re.S | re.M)
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", section, re.S))
    assert re.search(r"^kubectl .*delete statefulset slotstream", commands, re.M)
    assert not re.search(r"delete (pvc|persistentvolumeclaim|.*--all)", commands)
    assert "fullnameOverride=slotstream" in commands


def test_git_has_the_first_manifests() -> None:
    found = subprocess.run(
        ["git", "show", f"{FIRST}:deploy/kubernetes/statefulset.yaml"], cwd=ROOT, capture_output=True, check=True
    )
    assert yaml.safe_load(found.stdout)["spec"]["serviceName"] == "slotstream"
