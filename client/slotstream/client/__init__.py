"""Read what slotstream stored: `with connect("127.0.0.1:50151") as client: sample = client.get("my-sample")`.

Needs torch only to return tensors; `slotstream.client.dataset.SampleDataset` is its torch dataset.
"""

from slotstream.client.capturing import CaptureStream, capture
from slotstream.client.client import Client, connect
from slotstream.client.info import Forecast, NamespaceUsage, Page, Restored, SampleInfo, SampleState, Usage, Verdict
from slotstream.client.reading import RowBlock, RowReader
from slotstream.client.row_stream import RowStream
from slotstream.client.status import EngineStatus, ServerStatus, SharedStore, Status
from slotstream.client.tensors import Answer, Sample
from slotstream.client.training import rows
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
    "Answer",
    "BadLayers",
    "BadSampleId",
    "BadTokenRange",
    "CaptureStream",
    "Client",
    "ConfigError",
    "Damaged",
    "DeadlineExceeded",
    "EngineStatus",
    "Forecast",
    "IoError",
    "Leased",
    "NamespaceUsage",
    "Page",
    "PermissionDenied",
    "Restored",
    "RowBlock",
    "RowReader",
    "RowStream",
    "Sample",
    "SampleFailed",
    "SampleInfo",
    "SampleNotFound",
    "SampleState",
    "ServerStatus",
    "ServerUnavailable",
    "SharedStore",
    "SlotStreamError",
    "Status",
    "StillArriving",
    "Unauthenticated",
    "UnsupportedFormat",
    "Usage",
    "Verdict",
    "capture",
    "connect",
    "rows",
]
