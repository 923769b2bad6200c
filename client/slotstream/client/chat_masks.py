"""The assistant's tokens of a chat, as spans of positions: what `loss_mask` takes. The tokenizer is the caller's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from slotstream.wire.errors import ConfigError

ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # How a template marks what the assistant writes.

Spans = list[list[int]]


def assistant_spans(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any) -> tuple[list[int], Spans]:
    """The chat's token ids, and spans [start, stop) of those that the assistant wrote, ascending.

    tokenizer: a Hugging Face tokenizer with a chat template. template: what its `apply_chat_template` takes besides, such as
    `add_generation_prompt` (False), `tools` or `chat_template`. A template with `{% generation %}` says itself what the
    assistant writes. Of another one the turns are told by rendering the chat up to each of them.
    Raises ConfigError where the spans are in doubt: an earlier turn is rendered otherwise once another follows.
    """
    chat = [dict(message) for message in messages]
    template = {"add_generation_prompt": False, **template}
    if _MARKED.search(_template_of(tokenizer, template)):
        found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **template)
        ids, spans = list(found["input_ids"]), _runs(found["assistant_masks"])
    else:
        ids, spans = _turn_by_turn(tokenizer, chat, template)
    if not spans and any(message.get("role") == ASSISTANT for message in chat):
        raise ConfigError("the chat template marks no token of the assistant's turns: name the spans of loss_mask yourself")
    return ids, spans


def _template_of(tokenizer: Any, template: Mapping[str, Any]) -> str:
    try:
        found = tokenizer.get_chat_template(template.get("chat_template"), template.get("tools"))
    except ValueError as error:
        raise ConfigError(f"the tokenizer has no chat template, so the assistant's turns cannot be told: {error}") from error
    return str(found)


def _turn_by_turn(tokenizer: Any, chat: list[dict[str, Any]], template: dict[str, Any]) -> tuple[list[int], Spans]:
    def ids_of(turns: list[dict[str, Any]], generate: bool) -> list[int]:
        asked = {**template, "add_generation_prompt": generate}
        return list(tokenizer.apply_chat_template(turns, return_dict=True, **asked)["input_ids"])

    ids = ids_of(chat, bool(template["add_generation_prompt"]))
    spans: Spans = []
    for at, message in enumerate(chat):
        if message.get("role") != ASSISTANT:
            continue
        before, through = ids_of(chat[:at], True) if at else [], ids_of(chat[: at + 1], False)
        if ids[: len(through)] != through or through[: len(before)] != before or len(before) == len(through):
            raise ConfigError(
                f"turn {at} of the chat is rendered otherwise where it stands than by itself, so its tokens are in doubt: "
                "name the spans of loss_mask yourself, or use a template with {% generation %}"
            )
        stop = len(through)
        # What a template puts behind the end of the turn, as a line break, no model writes.
        while tokenizer.eos_token_id in through[len(before) :] and through[stop - 1] != tokenizer.eos_token_id:
            stop -= 1
        spans.append([len(before), stop])
    return ids, spans


def _runs(mask: Sequence[int]) -> Spans:
    edges = [at for at, (last, this) in enumerate(pairwise([0, *mask, 0])) if bool(last) != bool(this)]
    return [[start, stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def engine_ids(openai_client: Any, request: Mapping[str, Any]) -> list[int]:
    """The token ids that vLLM makes of a chat's request, from its `/tokenize`. Raises what the OpenAI client raises."""
    extra = request.get("extra_body") or {}
    names = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs")
    body = {name: request.get(name, extra.get(name)) for name in ("model", "messages", "tools", *names)}
    given = {name: value for name, value in body.items() if value is not None}
    root = str(openai_client.base_url).rstrip("/").removesuffix("/v1")
    return [int(token) for token in openai_client.post(f"{root}/tokenize", cast_to=object, body=given)["tokens"]]


def request_spans(openai_client: Any, tokenizer: Any, request: Mapping[str, Any], *, output: bool) -> Spans:
    """The assistant's spans of a chat's request; output: also what it is about to write.

    Raises ConfigError where they are in doubt, or where the engine makes other ids of the chat.
    """
    extra = request.get("extra_body") or {}
    if extra.get("continue_final_message"):
        raise ConfigError("a chat whose last message goes on has no turn of its own: name the spans of loss_mask yourself")
    template = {name: request.get(name, extra.get(name)) for name in ("tools", "chat_template")}
    ids, spans = assistant_spans(
        tokenizer,
        request["messages"],
        add_generation_prompt=extra.get("add_generation_prompt", True),
        **{name: value for name, value in template.items() if value is not None},
        **(extra.get("chat_template_kwargs") or {}),
    )
    engines = engine_ids(openai_client, request)
    if engines != ids:
        pairs = enumerate(zip(ids, engines, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), min(len(ids), len(engines)))
        raise ConfigError(
            f"the engine makes other tokens of this chat than the tokenizer, from token {same} on ({len(engines)} and "
            f"{len(ids)} in all): use the engine's own tokenizer and chat template"
        )
    if not output:
        return spans
    most = request.get("max_completion_tokens") or request.get("max_tokens")
    if not most:
        raise ConfigError("the mask of a chat with its output ends where max_tokens says: give it")
    return [*spans, [len(ids), len(ids) + most]]
