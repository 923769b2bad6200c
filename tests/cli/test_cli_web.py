"""`slotstream web`: its options, what it refuses at start, and how its process begins and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.secure import Authority
from support.server import INTERRUPTIBLE, run_cli
from support.web import Visitor, WebProcess

from slotstream.web.settings import WebSettings
from slotstream.wire.access import Access
from slotstream.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--listen", "0.0.0.0:0"], "--https-cert and --https-key"),
        (["--listen", "storage.example.org:0"], "can be reached from other machines"),
        (["--listen", "unix:/tmp/x"], "no unix socket"),
        (["--listen", "nonsense"], "nonsense"),
        (["--https-cert", "cert.pem"], "belong together"),
        (["--https-cert", "/none/cert.pem", "--https-key", "/none/key.pem"], "cannot read /none/cert.pem"),
        (["--host", "https://samples.example.org"], "is not a name such as"),
        (["--tokenizer", "model"], "is not MODEL=DIR"),
        (["--tokenizer", "model=/none"], "there is no file /none/tokenizer.json"),
        (["--tls-cert", "cert.pem"], "belong together"),
        (["--server", "http://here"], "here:50151"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_ends_the_start_in_one_sentence(words: list[str], said: str) -> None:
    done = run_cli("web", "--listen", "127.0.0.1:0", *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("slotstream web: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_no_tokenizer_ends_the_start(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    done = run_cli("web", "--listen", "127.0.0.1:0", "--tokenizer", f"m={tmp_path}")
    assert done.returncode == 2
    assert f"cannot read {tmp_path}/tokenizer.json" in done.stderr


def test_a_taken_port_is_one_sentence() -> None:
    with WebProcess("127.0.0.1:1") as page:
        done = run_cli("web", "--listen", page.url.removeprefix("http://"))
    assert done.returncode == 1
    assert done.stderr.startswith("slotstream web: cannot listen on ")
    assert done.stderr.count("\n") == 1


def test_without_its_extra_the_command_names_it(tmp_path: Path) -> None:
    """In a Python that has no Starlette, as the wheel without extras."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['starlette'] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_cli("web", environment={"PYTHONPATH": path})
    assert done.returncode == 1
    assert "pip install 'slotstream[web]'" in done.stderr


def test_it_is_a_process_of_its_own_that_imports_no_torch() -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, "web", "--listen", "127.0.0.1:0", "--server", "127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            url = running.stderr.readline().split()[0]
            assert Visitor(url).get("/login").status == 200
            words = Path(f"/proc/{running.pid}/cmdline").read_text().split("\0")
            assert words[1:4] == ["-P", "-m", "slotstream.web"]
            mapped = Path(f"/proc/{running.pid}/maps").read_text()
            assert "libtorch" not in mapped  # vLLM's tests preload a libgomp out of torch's folder.
            assert "numpy" in mapped  # The map is of modules, as far as they have libraries.
        finally:
            running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def test_ctrl_c_ends_it() -> None:
    with WebProcess("127.0.0.1:1") as page:
        assert page.stop(signal.SIGINT) == (130, "")


def test_the_page_has_no_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's would let everybody in."""
    monkeypatch.setenv("SLOTSTREAM_TOKEN", "no token at all, and nobody minds")
    monkeypatch.setenv("SLOTSTREAM_SERVER", f"unix:{tmp_path}/s")
    done = run_cli("web", "--listen", "0.0.0.0:0")
    assert "--https-cert" in done.stderr
    arguments = type("Arguments", (), dict.fromkeys(("server", "tls_ca", "tls_cert", "tls_key", "https_cert", "https_key")))
    for name, value in (("listen", "127.0.0.1:0"), ("host", []), ("tokenizer", []), ("allow_anonymous", False)):
        setattr(arguments, name, value)
    settings = WebSettings.from_arguments(arguments)
    assert settings.access == Access()
    assert settings.server == f"unix:{tmp_path}/s"


@pytest.mark.parametrize(
    ("listen", "server", "cert", "takes"),
    [
        ("127.0.0.1:1", "127.0.0.1:2", False, True),
        ("[::1]:1", "localhost:2", False, True),
        ("127.0.0.1:1", "unix:/s", False, False),
        ("127.0.0.1:1", "storage:2", False, False),
        ("127.0.0.1:1", "127.0.0.1:2,localhost:3", False, True),
        ("127.0.0.1:1", "127.0.0.1:2,storage:2", False, False),
        ("127.0.0.1:1", "127.0.0.1:2", True, False),
        ("0.0.0.0:1", "127.0.0.1:2", False, False),
    ],
)
def test_who_may_come_without_a_token(tmp_path: Path, listen: str, server: str, cert: bool, takes: bool) -> None:
    """Nobody whom the server itself would not have let in."""
    authority = Authority(tmp_path)
    pair = authority.issue("own")
    access = pair.access(authority) if cert else Access()
    https = {} if listen.startswith(("127", "[")) else {"https_cert": str(pair.cert), "https_key": str(pair.key)}
    for anyway in (False, True):
        settings = WebSettings(
            listen=listen,
            server=server,
            access=access,
            hosts=("a.example",),
            allow_anonymous=anyway,
            **https,  # type: ignore[arg-type]
        )
        assert settings.takes_anonymous is (takes or anyway)


def test_every_address_needs_a_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("page")
    https = {"https_cert": str(pair.cert), "https_key": str(pair.key)}
    for listen in ("0.0.0.0:1", "[::]:1"):
        with pytest.raises(ConfigError, match="--host"):
            WebSettings(listen=listen, server="127.0.0.1:2", access=Access(), **https)  # type: ignore[arg-type]
        settings = WebSettings(listen=listen, server="127.0.0.1:2", access=Access(), hosts=("a.example",), **https)  # type: ignore[arg-type]
        assert "a.example" in settings.names(1)
        assert not {"localhost:1", "127.0.0.1:1"} & settings.names(1)


def test_too_many_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 64"):
        WebSettings(listen="127.0.0.1:1", server="127.0.0.1:2", access=Access(), hosts=("a",) * 65)
