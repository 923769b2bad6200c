"""Element types by their safetensors names, so that code without torch can size and describe rows."""

from __future__ import annotations

# Name -> bytes per element, of hidden states. Source: the safetensors format's dtype list; the subset that vLLM can extract.
ELEMENT_BYTES: dict[str, int] = {"BF16": 2, "F16": 2, "F32": 4}

# Every type of the format whose elements are whole bytes. A type that is not here may still be one of a later version.
SAFETENSORS_BYTES: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
