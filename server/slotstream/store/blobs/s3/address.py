"""Where objects are: s3://bucket/prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slotstream.wire.errors import ConfigError

SCHEME = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,99}")
_NAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class Address:
    """`prefix` is "", or ends with "/"."""

    bucket: str
    prefix: str

    @classmethod
    def parsed(cls, url: str) -> Address:
        """Raises ConfigError. What it says does not repeat the URL: somebody may have put a password there."""
        place = url.removeprefix(SCHEME)
        if place == url or "@" in place or "?" in place:
            raise ConfigError(
                "an object store's URL is s3://BUCKET/PREFIX; credentials come from the environment, as the AWS CLI's"
            )
        bucket, _, rest = place.partition("/")
        names = [name for name in rest.split("/") if name]
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                "an object store's URL is s3://BUCKET/PREFIX, with a bucket's name of 3 to 63 characters a-z 0-9 . -"
            )
        if len(names) > _NAMES_MAX or not all(_NAME.fullmatch(name) for name in names):
            raise ConfigError(
                f"the prefix in an object store's URL is up to {_NAMES_MAX} names of letters, digits and _ = - . between /"
            )
        return cls(bucket, "".join(f"{name}/" for name in names))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix.removesuffix('/')}".removesuffix("/")
