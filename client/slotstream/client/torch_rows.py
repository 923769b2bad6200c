"""A stream of rows as torch's loaders take it: an IterableDataset whose epoch worker processes see."""

from __future__ import annotations

from typing import Any

from slotstream.client.row_stream import RowStream
from slotstream.client.tensors import require_torch

require_torch()

from torch.utils.data import IterableDataset  # noqa: E402  (after the sentence that names the extra)


class TorchRowStream(RowStream, IterableDataset[Any]):
    """`slotstream.client.rows` where torch is used."""

    def _share(self) -> Any:
        torch = require_torch()
        return torch.zeros(2, dtype=torch.int64).share_memory_()
