"""The assistant's tokens of chats, told by the engine's own tokenizer. Needs transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slotstream.client.chat_masks import assistant_spans
from slotstream.wire.errors import ConfigError


def mask_of(tokenizer_path: str) -> Callable[[Sequence[Mapping[str, Any]], Sequence[int]], list[list[int]]]:
    """Of a chat that waits for its answer, with what the engine makes of it. Raises ConfigError where that is in doubt."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("the assistant's turns are told by transformers: pip install transformers") from error
    loader: Any = AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(tokenizer_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {tokenizer_path!r}: {error}") from error

    def spans_of(messages: Sequence[Mapping[str, Any]], engines: Sequence[int]) -> list[list[int]]:
        ids, spans = assistant_spans(tokenizer, messages, add_generation_prompt=True)
        if ids != list(engines):
            raise ConfigError("the engine makes other tokens of this chat than the tokenizer: name its own with --tokenizer")
        return spans

    return spans_of
