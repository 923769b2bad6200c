"""Which samples are of a request, by what vLLM calls it: their ids are made of it.

vLLM calls the prompts of request ID `ID-0-...`, a chat `ID-...`, and their sequences `0_ID-...`, `1_ID-...`.
"""

from __future__ import annotations

import json
import re

from slotstream.wire.names import READABLE_CHARS_MAX, readable_id

SEQUENCES_MAX = 128  # Of one prompt, that are looked for.
OF_REQUEST_MAX = 10_000
# The number of a prompt, vLLM's random end, and the connector's digest of an id with other characters.
_BEHIND_REQUEST = re.compile(r"(-[0-9]{1,9})?(-[0-9a-f]{8})?(-[0-9a-f]{16})?")


def id_ranges(request_id: str) -> list[tuple[str, str]]:
    """[low, high): between which characters ids begin as those of the request do. Empty where no id can be made of it."""
    begins = readable_id(request_id)[:READABLE_CHARS_MAX]
    if not begins:
        return []
    lows = [f"{begins}-", *(f"{sequence}_{begins}-" for sequence in range(SEQUENCES_MAX))]
    return [(low, f"{low[:-1]}.") for low in lows]  # Up to the next character after "-".


def is_of_request(sample_id: str, metadata: str, low: str) -> bool:
    """Whether an id that begins with `low` is the default one of such a request: others may have been chosen by callers."""
    if _BEHIND_REQUEST.fullmatch(sample_id[len(low) - 1 :]) is None:
        return False
    try:
        request_id = json.loads(metadata).get("request_id")
    except (ValueError, AttributeError):
        return True  # Reading the row says that it is malformed.
    if not isinstance(request_id, str):
        return True  # A sample that was not stored keeps little.
    return sample_id.startswith(readable_id(request_id)[:READABLE_CHARS_MAX])
