"""Where `serve` finds its options: a flag goes before a variable, a variable before the file; the unknown is refused."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import regenerate_reference

from slotstream.cli import main as cli
from slotstream.cli.serve_arguments import add_serve_arguments, config_from_arguments, server_options
from slotstream.server.config import NO_DATA, ServerConfig
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.wire.errors import ConfigError

# Of every option: a value that is not its default, as a flag and a variable say it, and as the file does.
VALUES = {
    "data": ("D/data", '"data"'),
    "store": ("s3://bucket/prefix", '"s3://bucket/prefix"'),
    "catalogue": ("postgresql://me@host/db", '"postgresql://me@host/db"'),
    "scratch": ("D/scratch", '"scratch"'),
    "experimental": ("true", "true"),
    "listen": ("unix:/s,127.0.0.1:0", '["unix:/s", "127.0.0.1:0"]'),
    "metrics": ("[::1]:0", '"[::1]:0"'),
    "probes": ("[::1]:1", '"[::1]:1"'),
    "log_format": ("json", '"json"'),
    "log_level": ("debug", '"debug"'),
    "free_bytes_min": ("10GiB", '"10GiB"'),
    "window_bytes": ("9000000", "9_000_000"),
    "transport": ("grpc", '"grpc"'),
    "nixl_pool_bytes": ("40MB", '"40MB"'),
    "nixl_readers": ("1", "1"),
    "ingest_bytes_max": ("1GiB", "1073741824"),
    "drain_s": ("1m30s", "90"),
    "appear_grace_s": ("0.5", "0.5"),
    "tokens": ("D/tokens.toml", '"tokens.toml"'),
    "tls_cert": ("D/cert.pem", '"cert.pem"'),
    "tls_key": ("D/key.pem", '"./key.pem"'),
    "tls_client_ca": ("D/ca.pem", '"D/ca.pem"'),
    "allow_anonymous": ("true", "true"),
    "socket_mode": ("0660", '"0660"'),
    "open_samples_max": ("2", "2"),
    "peer_open_samples_max": ("3", "3"),
    "connections_max": ("4", "4"),
    "streams_max": ("5", "5"),
    "peer_streams_max": ("6", "6"),
    "reads_max": ("7", "7"),
    "peer_reads_max": ("8", "8"),
    "requests_max": ("9", "9"),
    "hello_s": ("11", "11.0"),
    "stream_idle_s": ("12s", '"12s"'),
    "sample_s_max": ("13", "13"),
    "read_stall_s": ("14", "14"),
    "workers": ("2", "2"),
    "retention": ("D/rules.toml", '"rules.toml"'),
    "retention_grace_s": ("15", "15"),
    "accept_clock": ("yes", "true"),
    "scrub_every_s": ("2w", '"2w"'),
    "scrub_bytes_per_s": ("32e6", "32e6"),
}
# Options that others contradict.
_ALONE = {"allow_anonymous": ["tokens", "tls_client_ca"], "workers": ["listen"]}


def _config(*words: str, **environ: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(words), environ)


def _file(folder: Path, text: str) -> str:
    path = folder / "serve.toml"
    path.write_text(text)
    return str(path)


def _variables(folder: Path, keys: list[str]) -> dict[str, str]:
    return {f"SLOTSTREAM_SERVE_{key.upper()}": VALUES[key][0].replace("D/", f"{folder}/") for key in keys}


def _flags(folder: Path, keys: list[str]) -> list[str]:
    words = []
    for key in keys:
        flag, text = f"--{key.replace('_', '-')}", VALUES[key][0].replace("D/", f"{folder}/")
        if text in ("true", "yes"):
            words.append(flag)
        else:
            words += [word for one in (text.split(",") if key == "listen" else [text]) for word in (flag, one)]
    return words


def _lines(folder: Path, keys: list[str]) -> str:
    return "".join(f"{key} = {VALUES[key][1].replace('D/', f'{folder}/')}\n" for key in keys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text("[default]\nsamples_max = 3\n")
    return tmp_path


def test_every_option_is_a_key_and_a_variable() -> None:
    assert [option.key for option in server_options()] == list(VALUES)
    assert {option.name for option in server_options()} | {"also_listen"} == {field.name for field in fields(ServerConfig)}


_STORE = ("store", "catalogue", "scratch")


@pytest.mark.parametrize(
    "left_out",
    [
        ("allow_anonymous", "workers", *_STORE),
        ("tokens", "tls_client_ca", "listen", *_STORE),
        ("allow_anonymous", "workers", "data"),
    ],
    ids=",".join,
)
def test_flag_variable_and_file_make_the_same_configuration(folder: Path, left_out: tuple[str, ...]) -> None:
    keys = [key for key in VALUES if key not in left_out]
    said = _config(*_flags(folder, keys))
    assert "me@host" not in repr(said)
    assert _config(**_variables(folder, keys)) == said
    assert _config("--config", _file(folder, _lines(folder, keys))) == said
    assert _config(SLOTSTREAM_SERVE_CONFIG=_file(folder, _lines(folder, keys).replace("_", "-", 1))) == said
    assert said.retention == Policy(default=Rule(samples_max=3))
    default = ServerConfig(data_dir=folder)
    usual = {f.name: NO_DATA if f.name == "data_dir" else getattr(default, f.name) for f in fields(ServerConfig)}
    same = {name for name, value in usual.items() if getattr(said, name) == value}
    assert same == {option.name for option in server_options() if option.key in left_out} | (
        {"also_listen"} if "listen" in left_out else set()
    )


@pytest.mark.parametrize("key", [key for key in VALUES if key not in ("data", "tls_cert", "tls_key", "tls_client_ca", *_STORE)])
def test_a_flag_goes_before_a_variable_and_that_before_the_file(folder: Path, key: str) -> None:
    other = {
        "listen": ("127.0.0.1:7", '"127.0.0.1:7"'),
        "allow_anonymous": ("false", "false"),
        "accept_clock": ("false", "false"),
        "experimental": ("false", "false"),
        "log_format": ("text", '"text"'),
        "log_level": ("error", '"error"'),
        "transport": ("auto", '"auto"'),
        "socket_mode": ("0640", '"0640"'),
        "retention": ("nowhere", '"nowhere"'),
        "metrics": ("127.0.0.1:1", '"127.0.0.1:1"'),
        "probes": ("127.0.0.1:1", '"127.0.0.1:1"'),
        "tokens": ("other", '"other"'),
    }.get(key, ("50000000", "50000000"))
    wanted = _config("--data", "d", *_flags(folder, [key]))
    variable = f"SLOTSTREAM_SERVE_{key.upper()}"
    low = _file(folder, f"data = {str(folder)!r}\n{key} = {other[1]}\n")
    assert _config("--config", low, "--data", "d", **_variables(folder, [key])) == wanted
    assert _config("--data", "d", *_flags(folder, [key]), **{variable: other[0]}) == wanted
    assert _config("--config", low, "--data", "d", *_flags(folder, [key])) == wanted


def test_a_variable_turns_off_what_the_file_turns_on(folder: Path) -> None:
    on = _file(folder, 'data = "d"\naccept_clock = true\n')
    assert _config("--config", on).accept_clock
    assert not _config("--config", on, SLOTSTREAM_SERVE_ACCEPT_CLOCK="0").accept_clock


def test_a_flag_names_another_file_than_the_variable(folder: Path) -> None:
    named = _file(folder, 'data = "d"\n')
    assert _config("--config", named, SLOTSTREAM_SERVE_CONFIG="/nowhere").data_dir == folder / "d"


def test_other_variables_of_slotstream_are_not_the_servers() -> None:
    assert _config("--data", "d", SLOTSTREAM_SERVER="x", SLOTSTREAM_TOKEN="y", SLOTSTREAM_SERVICE_HOST="z").workers == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dta = 'd'", "--config: FILE: unknown key 'dta'; did you mean data?"),
        ("free-byte-min = 1", "--config: FILE: unknown key 'free-byte-min'; did you mean free_bytes_min?"),
        ("xyzzy = 1\ndata_dir = 'd'", "--config: FILE: unknown key 'data_dir'; did you mean data?; unknown key 'xyzzy'"),
        ("[serve]\ndata = 'd'", "--config: FILE: unknown key 'serve'; did you mean store?"),
        ("drain_s = 1\ndrain-s = 1", "--config: FILE: 'drain_s' is there twice, with - and with _"),
        ("drain_s = 1\ndrain_s = 1", "--config: FILE is not TOML: Cannot overwrite a value (at line 2, column 12)"),
        ("drain_s = true", "--config: FILE: drain_s: it must be a number or a string"),
        ("drain_s = [1]", "--config: FILE: drain_s: it must be a number or a string"),
        ("drain_s = 'soon'", "--config: FILE: drain_s: 'soon' is not a time such as 30s, 1h30m or 90"),
        ("drain_s = -1", "--drain-s must be a number from 0 to 31536000, not -1.0 (--drain-s: drain_s in FILE)"),
        ("workers = 1.5", "--config: FILE: workers: 1.5 is no whole number"),
        ("workers = 'a'", "--config: FILE: workers: 'a' is no whole number"),
        ("workers = 0", "--workers must be 1 to 64, not 0 (--workers: workers in FILE)"),
        ("socket_mode = 384", "--config: FILE: socket_mode: it must be a string"),
        ("socket_mode = '999'", "--config: FILE: socket_mode: '999' is not an octal file mode"),
        ("listen = []", "--config: FILE: listen: it is empty: give it a value, or leave it out"),
        ("listen = [1]", "--config: FILE: listen: it must be a string"),
        ("listen = ''", "--config: FILE: listen: it is empty: give it a value, or leave it out"),
        ("data = 1979-05-27", "--config: FILE: data: it must be a string"),
        ('data = "a\\u0000b"', "--config: FILE: data: it has a zero byte in it"),
        ("allow_anonymous = 1", "--config: FILE: allow_anonymous: it must be true or false"),
        ("log_level = 'loud'", "--log-level 'loud' is not one of debug, info, warning, error (--log-level: log_level in FILE)"),
        ("tls_cert = 'c'", "--tls-cert and --tls-key belong together: give both, or neither (--tls-cert: tls_cert in FILE)"),
        (
            "retention = 'none'",
            "--retention: cannot read FOLDER/none: No such file or directory (--retention: retention in FILE)",
        ),
        ("workers = 0x" + "f" * 5000, "--config: FILE: workers: this integer is no whole number"),
        ("x = " + "[" * 9000, "--config: FILE is not TOML: "),
        ("\xff", "--config: FILE is not TOML: "),
        ("#" * (1 << 20), "--config: FILE is longer than 1048576 bytes"),
    ],
    ids=lambda value: value[:32] if value[:2] != "--" else "",
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_bytes(f"{text}\n".encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        _config("--config", str(path), **({} if text.startswith("data") else {"SLOTSTREAM_SERVE_DATA": "d"}))
    sentence = sentence.replace("FILE", str(path)).replace("FOLDER", str(tmp_path))
    assert str(caught.value).startswith(sentence) if sentence.endswith("TOML: ") else str(caught.value) == sentence


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("DTA", "d", "unknown variable 'SLOTSTREAM_SERVE_DTA'; did you mean SLOTSTREAM_SERVE_DATA?"),
        ("CONFG", "d", "unknown variable 'SLOTSTREAM_SERVE_CONFG'; did you mean SLOTSTREAM_SERVE_CONFIG?"),
        ("XYZZY", "d", "unknown variable 'SLOTSTREAM_SERVE_XYZZY'"),
        ("data", "d", "unknown variable 'SLOTSTREAM_SERVE_data'; did you mean SLOTSTREAM_SERVE_DATA?"),
        ("TOKENS", "", "SLOTSTREAM_SERVE_TOKENS: it is empty: give it a value, or unset it"),
        ("CONFIG", "", "SLOTSTREAM_SERVE_CONFIG is empty: name a file, or unset it"),
        ("CONFIG", "/nowhere/x", "--config: cannot read /nowhere/x: No such file or directory"),
        ("LISTEN", "127.0.0.1:0,", "SLOTSTREAM_SERVE_LISTEN: it is empty: give it a value, or leave it out"),
        ("ALLOW_ANONYMOUS", "maybe", "SLOTSTREAM_SERVE_ALLOW_ANONYMOUS: 'maybe' is neither true nor false"),
        ("FREE_BYTES_MIN", "10G", "SLOTSTREAM_SERVE_FREE_BYTES_MIN: '10G' could be 10GiB or 10GB: say which"),
        ("WORKERS", "two", "SLOTSTREAM_SERVE_WORKERS: 'two' is no whole number"),
        ("READS_MAX", "0", "(--reads-max: SLOTSTREAM_SERVE_READS_MAX)"),
    ],
    ids=lambda value: value[:32],
)
def test_what_is_wrong_in_a_variable_is_named(name: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config("--data", "d", **{f"SLOTSTREAM_SERVE_{name}": text})
    assert sentence in str(caught.value)


def test_a_server_without_a_directory_is_told_where_it_may_stand() -> None:
    with pytest.raises(ConfigError, match=r"^give --data, or SLOTSTREAM_SERVE_DATA, or data in the file of --config$"):
        _config()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--data d --catalogue postgresql://h/d", "--catalogue belongs to --store: give --store too"),
        ("--data d --scratch s", "--scratch belongs to --store: give --store too"),
        ("--store s3://b1b/x --data d", "--data and --store exclude each other: samples are files, or objects"),
        ("--store s3://b1b/x", "--store needs --catalogue too"),
        ("--store s3://b1b/x --catalogue postgresql://h/d", "--store needs --scratch too"),
        ("--store s3://b1b/x --catalogue postgresql://h/d --scratch s --workers 2", "start more servers"),
        ("--store s3://b1b/x --catalogue postgresql://me:word@h/d --scratch s", "PGPASSFILE"),
    ],
)
def test_what_belongs_to_the_store_is_told(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(*words.split())
    assert sentence in str(caught.value)
    assert "word" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize(
    ("rules", "store", "sentence"),
    [
        ("free_bytes_target = 9000000000", True, "with --store free_bytes_target needs bucket_bytes_max"),
        ("bucket_bytes_max = 9\nfree_bytes_target = 1", False, "bucket_bytes_max belongs to --store"),
        ("bucket_bytes_max = 9\nfree_bytes_target = 1", True, ""),
        ("free_bytes_target = 9000000000", False, ""),
    ],
)
def test_a_bucket_has_the_room_that_the_rules_say(tmp_path: Path, rules: str, store: bool, sentence: str) -> None:
    (tmp_path / "rules.toml").write_text(f"{rules}\n[default]\ndelete_when_full = true\n")
    pair = "--store s3://b1b/x --catalogue postgresql://h/d --scratch s"
    words = [*(pair if store else "--data d").split(), "--retention", str(tmp_path / "rules.toml")]
    if not sentence:
        assert _config(*words).retention.deletes_when_full
        return
    with pytest.raises(ConfigError, match=sentence):
        _config(*words)


def test_a_password_may_stand_in_the_environment() -> None:
    url = "postgresql://me:word@h/d"
    said = _config(*["--store", "s3://b1b/x", "--scratch", "s"], SLOTSTREAM_SERVE_CATALOGUE=url)
    assert said.catalogue == url


def test_the_check_looks_into_the_file_and_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = _file(tmp_path, 'data = "data"\ntokens = "tokens.toml"\n')
    assert cli.main(["serve", "--check-config", "--config", named]) == 2
    assert f"cannot read {tmp_path}/tokens.toml" in capsys.readouterr().err
    (tmp_path / "tokens.toml").write_text("nonsense = 1\n")
    assert cli.main(["serve", "--check-config", "--config", named]) == 2
    assert "it must hold one list of tables, tokens" in capsys.readouterr().err
    _file(tmp_path, 'data = "data"\n')
    assert cli.main(["serve", "--check-config", "--config", named]) == 0
    monkeypatch.setenv("SLOTSTREAM_SERVE_WORKERS", "65")
    assert cli.main(["serve", "--check-config", "--config", named]) == 2
    assert capsys.readouterr().err.endswith("not 65 (--workers: SLOTSTREAM_SERVE_WORKERS)\n")
    assert [path.name for path in tmp_path.iterdir() if path.name == "data"] == []


def test_the_file_on_the_reference_page_is_one(tmp_path: Path) -> None:
    text = regenerate_reference._SERVER.split("```toml\n")[1].split("```")[0]
    config = _config("--config", _file(tmp_path, text))
    assert (config.tokens_file, config.socket_mode) == (tmp_path / "tokens.toml", 0o660)
    assert tomllib.loads(text).keys() < {option.key for option in server_options()}
