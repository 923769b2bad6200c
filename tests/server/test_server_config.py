"""What a server can be told, and that what it cannot be told is named."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import regenerate_reference

from slotstream.cli import serve_arguments
from slotstream.cli.serve_arguments import add_serve_arguments, config_from_arguments
from slotstream.server.config import ServerConfig
from slotstream.server.metrics import code_label
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.wire.errors import ConfigError


def _parse(*arguments: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments))


def test_the_options_default_to_the_configuration() -> None:
    assert _parse("--data", "d") == ServerConfig(data_dir=Path("d"))


def test_every_option_reaches_the_configuration(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[default]\nsamples_max = 3\n")
    config = _parse(
        *(
            "--data",
            "d",
            "--listen",
            "unix:/s",
            "--listen",
            "[::1]:0",
            "--metrics",
            "[::1]:0",
            "--probes",
            "[::1]:0",
            "--log-format",
            "json",
            "--log-level",
            "debug",
        ),
        *("--free-bytes-min", "1", "--window-bytes", "9000000", "--drain-s", "0.5", "--appear-grace-s", "0"),
        *("--ingest-bytes-max", "9000001"),
        *("--open-samples-max", "7", "--reads-max", "8", "--retention", str(rules)),
        *("--scrub-every-s", "9", "--scrub-bytes-per-s", "10"),
        *("--transport", "grpc", "--nixl-pool-bytes", "40000000", "--nixl-readers", "1"),
    )
    assert config == ServerConfig(
        data_dir=Path("d"),
        listen="unix:/s",
        also_listen=("[::1]:0",),
        probes_listen="[::1]:0",
        metrics_listen="[::1]:0",
        log_format="json",
        log_level="debug",
        free_bytes_min=1,
        window_bytes=9_000_000,
        ingest_bytes_max=9_000_001,
        drain_s=0.5,
        appear_grace_s=0.0,
        open_samples_max=7,
        reads_max=8,
        retention=Policy(default=Rule(samples_max=3)),
        scrub_every_s=9.0,
        scrub_bytes_per_s=10.0,
        transport="grpc",
        nixl_pool_bytes=40_000_000,
        nixl_readers=1,
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"listen": "nowhere"}, "--listen"),
        ({"listen": "unix:relative"}, "--listen"),
        ({"metrics_listen": "unix:/s"}, "--metrics"),
        ({"metrics_listen": ":1"}, "--metrics"),
        ({"log_format": "xml"}, "--log-format"),
        ({"log_level": "loud"}, "--log-level"),
        ({"free_bytes_min": -1}, "--free-bytes-min"),
        ({"window_bytes": 1}, "--window-bytes"),
        ({"ingest_bytes_max": 9 << 20}, "--ingest-bytes-max"),
        ({"window_bytes": 1 << 64}, "--window-bytes"),
        ({"free_bytes_min": 10**400}, "--free-bytes-min"),
        ({"transport": "carrier pigeon"}, "--transport"),
        ({"nixl_pool_bytes": 16 << 20}, "--nixl-pool-bytes"),
        ({"nixl_readers": -1}, "--nixl-readers"),
        ({"nixl_readers": 9}, "--nixl-readers"),  # The pool has room for eight.
        ({"drain_s": float("inf")}, "--drain-s"),
        ({"drain_s": 1e300}, "--drain-s"),
        ({"appear_grace_s": float("nan")}, "--appear-grace-s"),
        ({"open_samples_max": 0}, "--open-samples-max"),
        ({"reads_max": 0}, "--reads-max"),
        ({"scrub_every_s": -1}, "--scrub-every-s"),
        ({"scrub_bytes_per_s": 0}, "--scrub-bytes-per-s"),
    ],
)
def test_a_value_that_cannot_work_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        ServerConfig(data_dir=Path("d"), **options)


def test_nixl_that_is_not_there_is_refused_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.wire.nixl._PACKAGES", ("a_package_that_nobody_has",))
    assert ServerConfig(data_dir=Path("d")).transport == "auto"
    with pytest.raises(ConfigError, match=r"^--transport is nixl.*pip install 'slotstream\[nixl\]'"):
        ServerConfig(data_dir=Path("d"), transport="nixl")


def test_the_help_shows_every_default() -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    text = " ".join(parser.format_help().split())
    assert text.count("(default:") == len(ServerConfig.__dataclass_fields__) - 1  # --listen is two fields.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Longer(ServerConfig):
    """With options that came later."""

    naps_max: int = field(default=2, metadata={"flag": "--naps", "help": "naps a day", "unit": "N", "least": 1, "most": 9})
    bed: str = field(default="hay", metadata={"flag": "--bed", "help": "where", "unit": None, "choices": ("hay", "moss")})
    pillow: Path | None = field(default=None, metadata={"flag": "--pillow", "help": "a soft file", "unit": "FILE"})
    snores: bool = field(default=False, metadata={"flag": "--snores", "help": "be heard", "unit": None})


def test_a_field_is_all_that_an_option_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_arguments, "ServerConfig", _Longer)
    assert _parse("--data", "d") == _Longer(data_dir=Path("d"))
    words = ("--naps", "3", "--bed", "moss", "--pillow", "p", "--snores")
    config = _Longer(data_dir=Path("d"), naps_max=3, bed="moss", pillow=Path("p"), snores=True)
    assert _parse("--data", "d", *words) == config
    with pytest.raises(ConfigError, match=r"^--naps must be a number from 1 to 9, not 10"):
        _parse("--data", "d", "--naps", "10")
    with pytest.raises(ConfigError, match=r"^--bed 'nails' is not one of hay, moss"):
        _Longer(data_dir=Path("d"), bed="nails")
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    assert "--pillow FILE a soft file (default: none)" in " ".join(parser.format_help().split())
    assert "| `--naps N` | 2 | naps a day |\n| `--bed hay\\|moss` | hay | where |\n" in regenerate_reference.reference()


def test_every_field_says_what_its_option_is() -> None:
    said = {f.name: f.metadata for f in fields(ServerConfig) if f.name != "also_listen"}  # That is --listen, repeated.
    assert {name for name, told in said.items() if not {"help", "flag", "unit"} <= told.keys()} == set()
    assert len({told["flag"] for told in said.values()}) == len(said)


def test_peers_cannot_invent_metric_labels() -> None:
    assert code_label("SLOT_MISMATCH") == "SLOT_MISMATCH"
    assert code_label("EVIL_1") == "OTHER"


@pytest.mark.parametrize(("option", "port"), [("listen", 50151), ("metrics_listen", 9464), ("probes_listen", 9465)])
def test_an_address_without_a_port_is_told_the_one_of_its_option(option: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"did you mean localhost:{port}\\?$"):
        ServerConfig(data_dir=Path("d"), **{option: "localhost"})  # type: ignore[arg-type]
