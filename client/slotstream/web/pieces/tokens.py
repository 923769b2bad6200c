"""Tokens as text, by tokenizers that the operator named; as their ids where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.cli.common import shown
from slotstream.wire.errors import ConfigError

_FILE_BYTES_MAX = 256 << 20
_TOKEN_CHARS_MAX = 64  # As shown: one token may stand for a line of spaces.


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one kind that follow each other: `prompt`, `output`, or `tokens` where the sample does not say."""

    kind: str
    first: int  # row
    texts: tuple[str, ...]


class Tokenizers:
    """By model, as vLLM serves it. Each is one local file; nothing is fetched, and no code of a model is run."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Raises ConfigError for a file that is no tokenizer's, or where the library is missing."""
        self._of_model: dict[str, Any] = {model: _load(model, file) for model, file in files.items()}

    def texts(self, model: str, token_ids: Sequence[int]) -> tuple[str, ...] | None:
        """One text a token, fit to be shown; None where there is no tokenizer of the model."""
        tokenizer = self._of_model.get(model)
        return None if tokenizer is None else tuple(_texts(tokenizer, token_ids))


def _load(model: str, file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"--tokenizer {model}: pip install tokenizers") from error
    try:
        if (size := file.stat().st_size) > _FILE_BYTES_MAX:
            raise ConfigError(f"--tokenizer {model}: {file} has {size} bytes, more than {_FILE_BYTES_MAX}")
        return Tokenizer.from_file(str(file))
    except ConfigError:
        raise
    except Exception as error:  # The library raises Exception itself.
        raise ConfigError(f"--tokenizer {model}: cannot read {file}: {error}") from error


def _texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    texts, before = [], 0
    for number, token_id in enumerate(token_ids):
        alone = _decoded(tokenizer, [token_id])
        text = alone
        if number:
            # Behind another one: decoders of some models drop the space in front of the first token.
            first, both = _decoded(tokenizer, [before]), _decoded(tokenizer, [before, token_id])
            if both.startswith(first) and len(both) > len(first):
                text = both[len(first) :]
        texts.append(visible(text) or f"‹{token_id}›")
        before = token_id
    return texts


def _decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Token ids are a peer's: one that the tokenizer lacks, or that no 32 bits hold, has no text."""
    if not all(0 <= token_id < 1 << 32 for token_id in token_ids):
        return ""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text


def visible(text: str) -> str:
    """Line breaks as ↵ before the break, other controls escaped, the middle of a long token left out."""
    if len(text) > _TOKEN_CHARS_MAX:
        half = _TOKEN_CHARS_MAX // 2
        text = f"{text[:half]}…{text[-half:]}"
    return "\n".join(shown(line) for line in text.split("\n")).replace("\n", "↵\n")


def parts(texts: Sequence[str], first: int, metadata: Mapping[str, str]) -> list[Part]:
    """`texts` of rows from `first` on, the prompt's apart from the output's, as the sample's metadata tells them."""
    prompt, begin = _number(metadata, "prompt_tokens"), _number(metadata, "token_start")
    if prompt is None:
        return [Part("tokens", first, tuple(texts))] if texts else []
    of_prompt = min(max(0, prompt - (begin or 0) - first), len(texts))
    halves = (Part("prompt", first, tuple(texts[:of_prompt])), Part("output", first + of_prompt, tuple(texts[of_prompt:])))
    return [half for half in halves if half.texts]


def _number(metadata: Mapping[str, str], key: str) -> int | None:
    """Metadata are a peer's: what is no number says nothing."""
    text = metadata.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
