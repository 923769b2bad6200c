"""The URL of a catalogue. Passwords may stand in it, so nothing shows it whole."""

from __future__ import annotations

from urllib.parse import parse_qsl

import psycopg
from psycopg.conninfo import conninfo_to_dict

from slotstream.wire.errors import ConfigError

SCHEMES = ("postgresql://", "postgres://")
VARIABLE = "SLOTSTREAM_SERVE_CATALOGUE"
_SECRETS = ("password", "sslpassword")


class Address:
    """Where a catalogue is. `str()` and `repr()` leave out all but user, host, port and database."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError."""
        if not url.startswith(SCHEMES):
            raise ConfigError("a catalogue's URL begins with postgresql://")
        try:
            settings = conninfo_to_dict(url)
        except psycopg.Error:
            # Its own words repeat parts of the URL.
            raise ConfigError("the catalogue's URL is malformed: postgresql://USER@HOST:PORT/DATABASE") from None
        self.settings = {name: str(value) for name, value in settings.items() if value is not None}

    def __str__(self) -> str:
        hosts, ports = self.settings.get("host", "").split(","), self.settings.get("port", "").split(",")
        if len(ports) == 1:
            ports *= len(hosts)
        pairs = zip(hosts, ports, strict=False)
        places = ",".join(host.replace("/", "%2F") + (f":{port}" if port else "") for host, port in pairs)
        user = f"{self.settings['user']}@" if "user" in self.settings else ""
        return f"postgresql://{user}{places}/{self.settings.get('dbname', '')}"

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    def redacted(self, text: str) -> str:
        """`text` without the passwords of this address."""
        for name in _SECRETS:
            if secret := self.settings.get(name):
                text = text.replace(secret, "***")
        return text


def has_password(url: str) -> bool:
    """Whether a password stands in a URL, also in a malformed one."""
    place, _, query = url.partition("?")
    user = place.partition("://")[2].rpartition("@")[0]
    named = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    return ":" in user or not named.isdisjoint(_SECRETS)


def check_command_line(url: str) -> None:
    """Raises ConfigError where a password stands in a URL of the command line, which everybody on the machine can see."""
    if has_password(url):
        raise ConfigError(
            "--catalogue has a password, and everybody on this machine can read the command line: "
            f"put the URL into {VARIABLE}, or the password into the file that PGPASSFILE names"
        )
