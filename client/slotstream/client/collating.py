"""Samples of different lengths as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slotstream.client.tensors import Sample, require_torch


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """A batch of samples, padded with zeros to the longest: what a DataLoader takes as its `collate_fn`.

    "hidden_states" [batch, rows, layers, hidden], "token_ids" int64 [batch, rows], "mask" bool [batch, rows] (True where there
    is a row), "lengths" int64 [batch], "sample_ids" a list of "namespace/sample_id", "layer_names" of all of them.
    Raises ValueError for samples whose layers, sizes or dtypes differ.
    """
    torch = require_torch()
    first = samples[0]
    kind = first.layer_names, first.hidden_states.shape[1:], first.hidden_states.dtype
    for sample in samples:
        if (sample.layer_names, sample.hidden_states.shape[1:], sample.hidden_states.dtype) != kind:
            raise ValueError(
                f"{sample.sample_id!r} has layers {sample.layer_names} of {tuple(sample.hidden_states.shape[1:])}, and "
                f"{first.sample_id!r} {first.layer_names} of {tuple(kind[1])}: a batch has samples of one kind"
            )
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    longest = int(lengths.max())
    rows = first.hidden_states.new_zeros((len(samples), longest, *kind[1]))
    token_ids = torch.zeros((len(samples), longest), dtype=torch.int64)
    for at, sample in enumerate(samples):
        rows[at, : len(sample.token_ids)] = sample.hidden_states
        token_ids[at, : len(sample.token_ids)] = sample.token_ids
    return {
        "hidden_states": rows,
        "token_ids": token_ids,
        "mask": torch.arange(longest) < lengths[:, None],
        "lengths": lengths,
        "sample_ids": [f"{sample.namespace}/{sample.sample_id}" for sample in samples],
        "layer_names": first.layer_names,
    }
