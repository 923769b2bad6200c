"""Which tokens of a chat the assistant wrote: as its template says, or turn by turn; what is in doubt is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slotstream.client import ConfigError, capture
from slotstream.client.chat_masks import assistant_spans, request_spans

pytest.importorskip("transformers")  # vLLM brings it.

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{% generation %}{{ m['content'] }}<end>"
    "{% endgeneration %}{% else %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As a template that drops what was thought in earlier turns.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else m['content'][:1] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "no, never"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token a byte, and one for the end of a turn."""
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def _texts(tokenizer: Any, ids: list[int], spans: list[list[int]]) -> list[str]:
    return [tokenizer.decode(ids[start:stop]) for start, stop in spans]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["turn by turn", "by the template"])
def test_the_assistants_tokens_end_with_the_end_of_its_turn(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    ids, spans = assistant_spans(tokenizer, CHAT)
    assert ids == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert _texts(tokenizer, ids, spans) == ["yes<end>", "no, never<end>"]
    ids, spans = assistant_spans(tokenizer, CHAT[:4], add_generation_prompt=True)
    assert tokenizer.decode(ids).endswith("two?<end>\n<assistant>")
    assert _texts(tokenizer, ids, spans) == ["yes<end>"]
    assert assistant_spans(tokenizer, CHAT[:2])[1] == []


def test_a_chat_may_begin_with_the_assistant(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    ids, spans = assistant_spans(tokenizer, CHAT[2:4])
    assert _texts(tokenizer, ids, spans) == ["<assistant>yes<end>"]


def test_turns_that_are_rendered_otherwise_where_they_stand_are_in_doubt(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ConfigError, match=r"turn 2 of the chat is rendered otherwise .* in doubt"):
        assistant_spans(tokenizer, CHAT)


def test_a_tokenizer_that_cannot_tell_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        assistant_spans(tokenizer, CHAT)
    tokenizer.chat_template = "{% if false %}{% generation %}x{% endgeneration %}{% endif %}" + PLAIN
    with pytest.raises(ConfigError, match="marks no token of the assistant's turns"):
        assistant_spans(tokenizer, CHAT)


class _Tokens:
    """The part of an OpenAI client that asks the engine for a chat's ids."""

    base_url = "http://engine:8000/v1/"

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.asked: list[tuple[str, Any]] = []

    def post(self, path: str, *, cast_to: object, body: Any) -> Any:
        self.asked.append((path, body))
        return {"tokens": self.ids}


def test_a_requests_spans_are_of_the_engines_ids(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    ids, spans = assistant_spans(tokenizer, CHAT, add_generation_prompt=True)
    engine = _Tokens(ids)
    request = {"model": "m", "messages": CHAT, "max_tokens": 9, "extra_body": {"chat_template_kwargs": {"deep": True}}}
    assert request_spans(engine, tokenizer, request, output=False) == spans
    assert request_spans(engine, tokenizer, request, output=True) == [*spans, [len(ids), len(ids) + 9]]
    path, body = engine.asked[0]
    assert path == "http://engine:8000/tokenize"
    assert body == {"model": "m", "messages": CHAT, "chat_template_kwargs": {"deep": True}}
    with pytest.raises(ConfigError, match="max_tokens"):
        request_spans(engine, tokenizer, {"model": "m", "messages": CHAT}, output=True)
    for other, at in ((ids[:-1], len(ids) - 1), ([*ids[:3], 0, *ids[4:]], 3)):
        with pytest.raises(ConfigError, match=f"other tokens of this chat than the tokenizer, from token {at} on"):
            request_spans(_Tokens(other), tokenizer, request, output=False)
    with pytest.raises(ConfigError, match="last message goes on"):
        request_spans(engine, tokenizer, {**request, "extra_body": {"continue_final_message": True}}, output=False)


def test_a_mask_of_the_assistant_is_of_chats() -> None:
    engine = SimpleNamespace(
        completions=SimpleNamespace(create=None), chat=SimpleNamespace(completions=SimpleNamespace(create=None))
    )
    for request in ({"prompt": "x"}, {"messages": CHAT}):  # The second without a tokenizer.
        with pytest.raises(ConfigError, match='loss_mask "assistant" is of chats'):
            capture(engine, slotstream={"loss_mask": "assistant"}, model="m", **request)
