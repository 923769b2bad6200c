"""Code to copy, which reads what the screen shows."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from slotstream.client import SampleInfo
from slotstream.wire.names import DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True)
class Code:
    python: str
    shell: str


def code_for(info: SampleInfo, server: str, start: int, stop: int, *, tls: bool) -> Code:
    """Reads rows [start, stop) in Python, and the whole sample into a file. The token is in $SLOTSTREAM_TOKEN_FILE for both."""
    address, name = json.dumps(server), json.dumps(info.sample_id)
    plain_space, whole = info.namespace == DEFAULT_NAMESPACE, (start, stop) == (0, info.num_tokens)
    options = [
        *([] if plain_space else [f"namespace={json.dumps(info.namespace)}"]),
        *([] if whole else [f"start={start}", f"stop={stop}"]),
        "count=False",  # It looks, and uses nothing up.
    ]
    lines_of_options = "\n        ".join(f"{option}," for option in options)
    python = f"""\
from slotstream.client import connect

server = {address}
with connect(server{', tls_ca="ca.pem"' if tls else ""}) as client:
    sample = client.get(
        {name},
        {lines_of_options}
    )
print(sample, sample.layer_names)
print(sample.hidden_states.shape)
"""
    lines = [
        ["slotstream", "get", info.sample_id],
        *([] if plain_space else [["--namespace", info.namespace]]),
        *([] if whole else [["--start", str(start), "--stop", str(stop)]]),
        ["-o", f"{info.sample_id}.safetensors"],
        ["--server", server],
        *([["--tls-ca", "ca.pem"]] if tls else []),
    ]
    return Code(python, " \\\n  ".join(map(shlex.join, lines)) + "\n")
