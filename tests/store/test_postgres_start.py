"""What a start of the catalogue in PostgreSQL looks at, what `slotstream migrate` does, and what shows of a URL."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from store.catalogues import committed
from support.postgres import as_user, catalogue_url, cluster
from support.server import run_cli
from support.waiting import wait_until

from slotstream.store.catalogue.postgres.address import Address, check_command_line
from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.catalogue.postgres.migrating import migrate, migrations
from slotstream.wire.errors import ConfigError, IoError
from slotstream.wire.hashing import to_hex, xxh3

pytestmark = pytest.mark.postgres

# Migrations that were released -> xxh3-64 of their files. They never change, and a new one only adds.
RELEASED = {
    "0001_samples.sql": "de28be6db70b9be2",
    "0002_attempts.sql": "b1cef39af46986d8",
    "0003_generation.sql": "22e63c6e03a9693c",
    "0004_failure_shares.sql": "b330b710c9fb5b11",
}


def _sql(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        for statement in statements:
            db.execute(statement)


def test_a_database_without_tables_is_refused_and_the_command_named() -> None:
    url = cluster().database()
    with pytest.raises(ConfigError, match=r"has no tables, .* run slotstream migrate --catalogue URL"):
        PostgresCatalogue(url)


def test_an_older_schema_is_refused_and_the_command_named() -> None:
    url = catalogue_url()
    _sql(url, "DELETE FROM slotstream.migrations WHERE number > 1")
    with pytest.raises(ConfigError, match=r"has .*, and this version needs schema \d+: run slotstream migrate"):
        PostgresCatalogue(url)


def test_a_newer_schema_only_has_more() -> None:
    url = catalogue_url()
    _sql(
        url,
        "ALTER TABLE slotstream.samples ADD COLUMN colour text NOT NULL DEFAULT 'none'",
        "ALTER TABLE slotstream.leases ADD COLUMN colour text",
        "INSERT INTO slotstream.migrations (number, name) VALUES (99, '0099_later.sql')",
    )
    catalogue = PostgresCatalogue(url)
    catalogue.commit(committed()).result()
    assert catalogue.lease(committed().key, "me", 60, 10, 10) > 0
    catalogue.close()
    assert migrate(url) == []


def test_migrations_are_done_once_by_any_number_of_commands_at_a_time() -> None:
    url = cluster().database()
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(migrate, [url] * 4))
    assert sorted(done) == [[], [], [], [migration.name for migration in migrations()]]
    PostgresCatalogue(url).close()


def test_a_migration_that_fails_leaves_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotstream.store.catalogue.postgres import migrating

    url = catalogue_url()
    broken = migrating.Migration(len(migrations()) + 1, "broken.sql", "CREATE TABLE half (a int); SELECT nothing FROM nowhere")
    monkeypatch.setattr(migrating, "migrations", lambda: [*migrations(), broken])
    with pytest.raises(IoError):
        migrating.migrate(url)
    with psycopg.connect(url) as db:
        assert db.execute("SELECT to_regclass('slotstream.half')").fetchone() == (None,)
        assert db.execute("SELECT max(number) FROM slotstream.migrations").fetchone() == (broken.number - 1,)


def test_released_migrations_never_change_and_only_add() -> None:
    assert {one.name: to_hex(xxh3(one.sql.encode())) for one in migrations()} == RELEASED
    for one in migrations():
        words = one.sql.upper().split()
        assert not {"DROP", "RENAME", "TRUNCATE"} & set(words), one.name


def test_a_user_without_rights_is_told_so() -> None:
    url = cluster().database()
    role = f"weak_{url.rpartition('_')[2]}"
    _sql(url, f"CREATE ROLE {role} LOGIN")
    with pytest.raises(ConfigError, match="may not make the tables"):
        migrate(url.replace("postgres@", f"{role}@"))


def test_a_database_with_another_encoding_is_refused() -> None:
    _sql(cluster().url("postgres"), "CREATE DATABASE latin TEMPLATE template0 ENCODING LATIN1 LOCALE_PROVIDER libc LOCALE 'C'")
    with pytest.raises(ConfigError, match="UTF8"):
        migrate(cluster().url("latin"))


# PgBouncer.


@contextmanager
def _bouncer(mode: str, url: str) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="slotstream-bouncer-", dir="/tmp"))
    database = url.rpartition("/")[2]
    (folder / "users").write_text('"postgres" ""\n')
    (folder / "ini").write_text(
        f"[databases]\n{database} = host={cluster().folder} user=postgres\n[pgbouncer]\npool_mode = {mode}\nlisten_addr =\n"
        f"unix_socket_dir = {folder}\nauth_type = trust\nauth_file = {folder}/users\nlogfile = {folder}/log\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777)
    with subprocess.Popen(
        [*as_user(), shutil.which("pgbouncer") or "/usr/sbin/pgbouncer", folder / "ini"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: (folder / ".s.PGSQL.6432").exists())
            yield f"postgresql://postgres@{quote(str(folder), safe='')}:6432/{database}"
        finally:
            process.terminate()
    shutil.rmtree(folder)


def test_a_pool_of_transactions_is_refused() -> None:
    with _bouncer("transaction", catalogue_url()) as url, pytest.raises(ConfigError, match="PgBouncer in transaction mode"):
        PostgresCatalogue(url)


def test_a_pool_of_sessions_is_taken() -> None:
    with _bouncer("session", catalogue_url()) as url:
        catalogue = PostgresCatalogue(url)
        catalogue.commit(committed()).result()
        assert catalogue.get(committed().key) == committed()
        catalogue.close()


# URLs and passwords.

_SECRET = "hunter2%2Fx"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://me:{_SECRET}@db.example:5433/store", "postgresql://me@db.example:5433/store"),
        (f"postgres://me:{_SECRET}@a,b/store?sslmode=require", "postgresql://me@a,b/store"),
        (f"postgresql:///store?host=/tmp&password={_SECRET}", "postgresql://%2Ftmp/store"),
        (f"postgresql://me@a/store?sslpassword={_SECRET}", "postgresql://me@a/store"),
        ("postgresql://", "postgresql:///"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, shown: str) -> None:
    address = Address(url)
    assert (str(address), repr(address)) == (shown, f"Address({shown!r})")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{_SECRET}@db.example/store%zz",
        f"postgresql://me:{_SECRET}@db.example/store?nosuchoption=1",
        f"mysql://me:{_SECRET}@db.example/store",
        f"host=db password={_SECRET}",
        "",
    ],
)
def test_a_malformed_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@db/store",
        "postgresql://me:@db/store",
        "postgresql://me:a/b@c@db/store",
        "postgresql://db/store?password=secret",
        "postgresql://db/store?sslmode=require&pass%77ord=secret",
        "postgresql://db/store?sslpassword=secret",
    ],
)
def test_a_password_on_the_command_line_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="PGPASSFILE") as caught:
        check_command_line(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://me@db:5432/store", "postgresql://[::1]:5432/store", "postgresql:///a?host=/b:c"])
def test_a_url_without_a_password_is_taken(url: str) -> None:
    check_command_line(url)


def test_nothing_that_fails_shows_a_password(caplog: pytest.LogCaptureFixture) -> None:
    """A server that answers, with rights for nobody; and one that is not there."""
    caplog.set_level(logging.DEBUG)
    url = cluster().database()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = f"postgresql://me:{_SECRET}@127.0.0.1:{taken.getsockname()[1]}/store"
        for wrong in (away, url.replace("postgres@", f"nobody:{_SECRET}@")):
            with pytest.raises(IoError) as caught:
                PostgresCatalogue(wrong)
            assert "hunter2" not in str(caught.value) + caplog.text
            assert "cannot be reached" in str(caught.value)


# The command.


def test_the_command_makes_the_tables_and_says_so_once_more() -> None:
    url = cluster().database()
    first, again = (run_cli("migrate", "--catalogue", url) for _ in range(2))
    assert (first.returncode, first.stdout) == (
        0,
        "".join(f"{name}\n" for name in RELEASED),
    ), first.stderr
    assert (again.returncode, again.stdout) == (0, "")
    assert "already" in again.stderr


def test_the_command_takes_a_url_with_a_password_from_the_environment() -> None:
    url = cluster().database().replace("postgres@", "postgres:secret@")
    refused = run_cli("migrate", "--catalogue", url)
    assert refused.returncode == 2
    assert "secret" not in refused.stderr
    assert "SLOTSTREAM_SERVE_CATALOGUE" in refused.stderr
    taken = run_cli("migrate", environment={"SLOTSTREAM_SERVE_CATALOGUE": url})
    assert taken.returncode == 0, taken.stderr
    assert run_cli("migrate").returncode == 2


def test_the_command_says_that_the_database_is_away() -> None:
    done = run_cli("migrate", "--catalogue", "postgresql://me@%2Fnowhere/store")
    assert done.returncode == 1
    assert done.stderr.endswith("(IO_ERROR)\n")
