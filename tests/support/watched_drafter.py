"""What vLLM's drafters are given and what they draft, written down call by call: `worker_extension_cls` of an engine.

SLOTSTREAM_TEST_DRAFTS names the file. A line has the SHA-256 of each tensor that `propose` got, and the drafted tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

_PATH = os.environ.get("SLOTSTREAM_TEST_DRAFTS", os.devnull)


def _plain(value: Any) -> Any:
    """JSON of an argument or a result: tensors by what they hold, everything else that has no plain form left out."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        contents = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(contents).hexdigest()]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _watched(propose: Any) -> Any:
    @functools.wraps(propose)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [_plain(args), {name: _plain(value) for name, value in sorted(kwargs.items())}]
        drafted = propose(self, *args, **kwargs)
        tokens = drafted.tolist() if isinstance(drafted, torch.Tensor) else _plain(drafted)
        with open(_PATH, "a") as out:  # noqa: PTH123  (os.devnull is no file to be created)
            out.write(json.dumps({"given": given, "drafted": tokens}) + "\n")
        return drafted

    return call


class WatchedDrafter:
    """Mixed into vLLM's worker; importing this module is what counts."""


for _drafter in (EagleProposer, NgramProposer):
    setattr(_drafter, "propose", _watched(_drafter.propose))  # noqa: B010  (mypy: a method is no variable)
