"""Writes what kustomize cannot take from outside its folder: the alerts and the dashboard as objects of the component.

With --check it says whether the committed files are what they would be.
"""

from __future__ import annotations

import sys
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
COMPONENT = DEPLOY / "kubernetes" / "components" / "prometheus"
_METADATA = """metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: slotstream
    app.kubernetes.io/instance: slotstream
"""


def _indented(text: str, by: int) -> str:
    return "".join(f"{' ' * by}{line}" if line.strip() else line for line in text.splitlines(keepends=True))


def manifests() -> dict[Path, str]:
    """Each file and its text."""
    rules = (DEPLOY / "prometheus" / "rules.yaml").read_text()
    dashboard = (DEPLOY / "grafana" / "slotstream.json").read_text()
    made = "# Made by tests/regenerate_manifests.py out of {}: change that.\n"
    rule = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n" + _METADATA.format(name="slotstream")
    board = "apiVersion: v1\nkind: ConfigMap\n" + _METADATA.format(name="slotstream-dashboard") + '    grafana_dashboard: "1"\n'
    return {
        COMPONENT / "prometheusrule.yaml": made.format("deploy/prometheus/rules.yaml") + rule + "spec:\n" + _indented(rules, 2),
        COMPONENT / "dashboard.yaml": made.format("deploy/grafana/slotstream.json")
        + board
        + "data:\n  slotstream.json: |\n"
        + _indented(dashboard, 4),
    }


def main() -> int:
    stale = [path for path, text in manifests().items() if not path.exists() or path.read_text() != text]
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path} is stale: run `python tests/{Path(__file__).name}` and commit it", file=sys.stderr)
        return 1 if stale else 0
    for path, text in manifests().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
