"""Read what slotstream stored: `with connect("127.0.0.1:50151") as client: sample = client.get("my-sample")`.

Needs torch only to return tensors; `slotstream.client.dataset.SampleDataset` is its torch dataset.
"""

from slotstream.client.client import Client, connect
from slotstream.client.info import NamespaceUsage, Restored, SampleInfo, SampleState, Usage, Verdict
from slotstream.client.reading import RowBlock, RowReader
from slotstream.client.tensors import Sample
from slotstream.wire.errors import (
    BadLayers,
    BadSampleId,
    BadTokenRange,
    ConfigError,
    Damaged,
    DeadlineExceeded,
    IoError,
    Leased,
    PermissionDenied,
    SampleFailed,
    SampleNotFound,
    ServerUnavailable,
    SlotStreamError,
    StillArriving,
    Unauthenticated,
    UnsupportedFormat,
)

__all__ = [
    "BadLayers",
    "BadSampleId",
    "BadTokenRange",
    "Client",
    "ConfigError",
    "Damaged",
    "DeadlineExceeded",
    "IoError",
    "Leased",
    "NamespaceUsage",
    "PermissionDenied",
    "Restored",
    "RowBlock",
    "RowReader",
    "Sample",
    "SampleFailed",
    "SampleInfo",
    "SampleNotFound",
    "SampleState",
    "ServerUnavailable",
    "SlotStreamError",
    "StillArriving",
    "Unauthenticated",
    "UnsupportedFormat",
    "Usage",
    "Verdict",
    "connect",
]
