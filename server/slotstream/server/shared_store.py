"""`--store`: the store of one server of several. Its packages are loaded only where it is asked for."""

from __future__ import annotations

from slotstream.server.config import ServerConfig
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import ConfigError

_NEEDS = "--store needs botocore, urllib3, awscrt and psycopg: pip install 'slotstream[s3,postgres]'"


def open_shared_store(config: ServerConfig) -> SampleStore:
    """Raises ConfigError."""
    try:
        from slotstream.store.cluster.opening import open_store
    except ModuleNotFoundError as error:
        raise ConfigError(_NEEDS) from error
    assert config.store is not None, "it is asked for"
    assert config.catalogue is not None, "the configuration checks it"
    assert config.scratch is not None, "the configuration checks it"
    return open_store(config.store, config.catalogue, config.scratch, free_bytes_min=config.free_bytes_min)


def check_shared_store(config: ServerConfig) -> None:
    """Whether bucket and catalogue can be used. Raises ConfigError."""
    try:
        from slotstream.store.cluster.opening import check
    except ModuleNotFoundError as error:
        raise ConfigError(_NEEDS) from error
    assert config.store is not None, "it is asked for"
    assert config.catalogue is not None, "the configuration checks it"
    check(config.store, config.catalogue)


def check_command_line(url: str) -> None:
    """Raises ConfigError where a password stands in the URL of a catalogue that the command line has."""
    try:
        from slotstream.store.cluster.opening import check_command_line as check
    except ModuleNotFoundError as error:
        raise ConfigError(_NEEDS) from error
    check(url)
