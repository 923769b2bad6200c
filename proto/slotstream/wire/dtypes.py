"""Element types by their safetensors names, so that code without torch can size and describe rows."""

from __future__ import annotations

from slotstream.wire.errors import BadParams

# Name -> bytes per element. Source: the safetensors format's dtype list; the subset that vLLM can extract.
ELEMENT_BYTES: dict[str, int] = {"BF16": 2, "F16": 2, "F32": 4}


def row_bytes(dtype: str, num_layers: int, hidden_size: int) -> int:
    """Bytes of one row [num_layers, hidden_size]. Raises BadParams for a dtype that is not known."""
    if dtype not in ELEMENT_BYTES:
        raise BadParams(f"dtype {dtype!r} is not one of {sorted(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype] * num_layers * hidden_size
