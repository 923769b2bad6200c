"""Sizes and times on the command line take units."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from slotstream.cli import common, units
from slotstream.cli import main as cli
from slotstream.cli.serve_arguments import add_serve_arguments, config_from_arguments
from slotstream.server.config import ServerConfig


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("10GiB", 10 << 30),
        ("1e12", 10**12),
        ("10 GiB", 10 << 30),
        ("10gib", 10 << 30),
        ("1.5KiB", 1536),
        ("1.5GB", 1_500_000_000),
        ("7B", 7),
        ("2TiB", 2 << 40),
        ("0.5kB", 500),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert units.size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "10G", "10XiB", "-1GiB", "1.0001KiB", "0.3B", "ten", "1,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        units.size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("0.5", 0.5),
        ("30s", 30),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("7d", 604800),
        ("1.5h", 5400),
        ("2w", 1209600),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert units.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "1h30", "1y", "-5s", "1 h", "soon", "1h-30m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        units.seconds(text)


def _parsed(*words: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(["--data", "d", *words]))


def test_the_servers_options_take_them() -> None:
    config = _parsed("--free-bytes-min", "10GiB", "--scrub-bytes-per-s", "64MiB", "--drain-s", "1h30m", "--hello-s", "500ms")
    assert (config.free_bytes_min, config.scrub_bytes_per_s) == (10 << 30, 64 << 20)
    assert (config.drain_s, config.hello_s) == (5400, 0.5)
    assert config == _parsed(
        "--free-bytes-min", "10737418240", "--scrub-bytes-per-s", "67108864", "--drain-s", "5400", "--hello-s", "0.5"
    )


def test_every_size_and_time_of_the_server_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the unit that the field says; nothing is listed twice."""
    monkeypatch.setattr(units, "size", lambda text: 1 << 30)
    monkeypatch.setattr(units, "seconds", lambda text: 60.0)
    for field in ServerConfig.__dataclass_fields__.values():
        value = {"BYTES": 1 << 30, "SECONDS": 60.0}.get(field.metadata.get("unit", ""))
        if value is not None:
            words = [field.metadata["flag"], "x", "--ingest-bytes-max", "y"]
            assert getattr(_parsed(*words), field.name) == value


def test_a_wrong_unit_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--data", "d", "--free-bytes-min", "10G"])
    assert caught.value.code == 2
    assert "--free-bytes-min: '10G' could be 10GiB or 10GB: say which" in capsys.readouterr().err


def test_the_other_commands_take_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 1_800_000_000_000_000_000
    monkeypatch.setattr("time.time_ns", lambda: now)
    assert common.moment("1h30m") == now - 5400 * 10**9
    assert common.moment("1h30m ago") == now - 5400 * 10**9
    assert cli.main(["get", "a", "--wait", "2h", "--server", "127.0.0.1:1"]) == 1
    assert "2 and 3600" not in capsys.readouterr().err


def test_a_gibibyte_stays_free_unless_somebody_says_otherwise() -> None:
    assert ServerConfig(data_dir=Path("d")).free_bytes_min == 1 << 30
