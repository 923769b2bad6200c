"""A PostgreSQL of the tests' own: Debian's programs, a folder that goes with it, a Unix socket, and no port.

One cluster a test session, one database a test. `make postgres` installs it.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

import psycopg

_WAIT_S = 60.0
_USER = "postgres"
_SETTINGS = {
    "listen_addresses": "",
    "max_connections": "300",
    "fsync": "off",  # Processes are killed here, and no machine loses its power.
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "deadlock_timeout": "200ms",
    "log_min_messages": "fatal",
}


def programs() -> Path:
    """Where initdb and postgres are. Fails the test where they are nowhere: `make postgres` installs them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found and (named := shutil.which("initdb")) is not None:
        found = [Path(named)]
    assert found, "there is no PostgreSQL: make postgres installs it"
    return found[-1].parent


def as_user() -> list[str]:
    """What a command begins with that may not run as root."""
    return ["runuser", "-u", _USER, "--"] if os.getuid() == 0 else []


class Cluster:
    """One server process with its databases. `kill` and `start` it as often as you like."""

    def __init__(self, **settings: str) -> None:
        """`settings`: of the server, beside those that make it fast."""
        self._bin = programs()
        self.folder = Path(tempfile.mkdtemp(prefix="slotstream-postgres-", dir="/tmp"))  # A socket's path has to be short.
        self._settings = {**_SETTINGS, "unix_socket_directories": str(self.folder), **settings}
        self._as_user = as_user()
        if os.getuid() == 0:  # PostgreSQL refuses to run as root.
            owner = pwd.getpwnam(_USER)
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        # Sorted as people sort, where that can be said: what needs another order has to say so.
        provider = ["--locale-provider=icu", "--icu-locale=en-US"] if int(self._bin.parts[-2]) >= 15 else []
        options = ["--username", _USER, "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync", *provider]
        subprocess.run(
            [*self._as_user, self._bin / "initdb", "--pgdata", self.data, *options],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/tmp",
        )
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        """Waits until it answers."""
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as_user, self._bin / "postgres", "-D", self.data, *options], stdout=log, stderr=log, cwd="/tmp"
            )
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                psycopg.connect(self.url(_USER), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < until, (self.folder / "log").read_text()
                assert self._process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as a machine that goes away: of the server's first process, upon which the others end."""
        pid = self.pid()
        os.kill(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        until = time.monotonic() + _WAIT_S
        while set(self._pids()) - {pid}:  # A new server refuses to start beside one.
            assert time.monotonic() < until
            time.sleep(0.02)
        (self.data / "postmaster.pid").unlink()

    def pause(self) -> None:
        """SIGSTOP of all its processes, as a machine that hangs, until `go_on`."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)  # Where that is runuser, it stopped as well.
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def pid(self) -> int:
        """Of the server's first process."""
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def _pids(self) -> list[int]:
        """Of all the server's processes."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "cwd").readlink() == self.data:
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """For good."""
        if self._process is not None and self._process.poll() is None:
            self.go_on()
            os.kill(self.pid(), signal.SIGQUIT)
            self._process.wait()
        shutil.rmtree(self.folder)

    def url(self, database: str, host: Path | None = None) -> str:
        return f"postgresql://{_USER}@{quote(str(host or self.folder), safe='')}/{database}"

    def dump(self, url: str) -> bytes:
        """What pg_dump says of a catalogue."""
        command = [str(self._bin / "pg_dump"), "--schema", "slotstream", "--dbname", url]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout

    def restore(self, url: str, dump: bytes) -> None:
        """In place of the catalogue that is there, in one transaction."""
        command = [str(self._bin / "psql"), "--quiet", "--single-transaction", "--set", "ON_ERROR_STOP=1", "--dbname", url]
        sql = b"SET client_min_messages = warning; DROP SCHEMA slotstream CASCADE;\n" + dump
        subprocess.run(command, check=True, input=sql, stdout=subprocess.DEVNULL)

    def database(self, template: str = "template1") -> str:
        """The URL of a new one."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self.url(_USER), autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)


@cache
def cluster() -> Cluster:
    """The session's. It ends with the process, by `stop_cluster`."""
    return Cluster()


def stop_cluster() -> None:
    if cluster.cache_info().currsize:
        cluster().stop()
        cluster.cache_clear()


@cache
def _migrated() -> str:
    """The name of a database with the tables."""
    from slotstream.store.catalogue.postgres.migrating import migrate

    url = cluster().database()
    migrate(url)
    return url.rpartition("/")[2]


def catalogue_url() -> str:
    """A new database with the tables in it, in the session's cluster."""
    return cluster().database(_migrated())


def set_by_hand(url: str, now: int) -> Callable[[int], None]:
    """From here on the catalogue's clock stands still; what is returned sets it, Unix nanoseconds."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("SET search_path = slotstream")
        db.execute("CREATE TABLE hand_clock AS SELECT %s::bigint AS now", (now,))
        db.execute(
            "CREATE OR REPLACE FUNCTION now_unix_ns() RETURNS bigint LANGUAGE sql VOLATILE "
            "AS $$ SELECT now FROM slotstream.hand_clock $$"
        )

    def set_clock(now: int) -> None:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("UPDATE slotstream.hand_clock SET now = %s", (now,))

    return set_clock
