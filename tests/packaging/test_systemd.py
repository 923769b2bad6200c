"""The unit of `deploy/systemd` and its file of options are what systemd and the server take."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slotstream.cli.main import EXIT_USAGE
from slotstream.cli.serve_arguments import add_serve_arguments, config_from_arguments
from slotstream.server.app import _LAST_CALLS_S
from slotstream.server.config import ServerConfig
from slotstream.server.processes.workers import _STOP_S as WORKERS_STOP_S
from slotstream.store.upkeep.retention import Policy

SYSTEMD = Path(__file__).resolve().parents[2] / "deploy" / "systemd"


def _unit() -> dict[str, list[str]]:
    """What the unit says, by key; a key may stand there more than once."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / "slotstream.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def _config_of_the_unit() -> ServerConfig:
    (command,) = _unit()["ExecStart"]
    program, name, *words = shlex.split(command)
    assert (Path(program).name, name) == ("slotstream", "serve")
    assert words == ["--config", "/etc/slotstream/serve.toml"]
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(["--config", str(SYSTEMD / "serve.toml")]), {})


def test_the_unit_starts_what_the_server_takes() -> None:
    config, unit = _config_of_the_unit(), _unit()
    assert unit["Type"] == ["notify"]
    assert str(config.data_dir) == f"/var/lib/{unit['StateDirectory'][0]}"
    assert int(unit["TimeoutStopSec"][0]) >= config.drain_s + WORKERS_STOP_S + _LAST_CALLS_S + 10
    assert unit["RestartPreventExitStatus"] == [str(EXIT_USAGE)]


def test_what_the_file_has_behind_a_comment_is_right_too(tmp_path: Path) -> None:
    text = (SYSTEMD / "serve.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("listen = ")]
    (tmp_path / "serve.toml").write_text("\n".join(re.sub(r"^# (?=\w+ = )", "", line) for line in lines))
    (tmp_path / "retention.toml").write_text("[default]\nsamples_max = 3\n")
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    config = config_from_arguments(parser.parse_args(["--config", str(tmp_path / "serve.toml")]), {})
    assert config.tokens_file == tmp_path / "tokens.toml"
    assert config.also_listen == ("unix:/run/slotstream/ingest.sock",)
    assert config.retention != Policy()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (SYSTEMD / "slotstream.service").read_text()
    unit = tmp_path / "slotstream.service"

    def complaints(text: str) -> str:
        unit.write_text(text.replace("/opt/slotstream/bin/slotstream", sys.executable))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
        )
        said = "\n".join(line for line in done.stderr.splitlines() if unit.name in line)
        return said or ("" if done.returncode == 0 else done.stderr)

    assert complaints(text) == ""
    assert "Tipe" in complaints(text.replace("Type=", "Tipe="))
    assert "sometimes" in complaints(text.replace("Restart=on-failure", "Restart=sometimes"))
