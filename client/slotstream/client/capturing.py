"""One request to vLLM, its answer, and its sample: `response, sample = capture(openai.OpenAI(...), model="m", prompt="..")`."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from slotstream.client.chat_masks import ASSISTANT, request_spans
from slotstream.client.client import SERVER_VARIABLE, Client, connect
from slotstream.client.tensors import Sample, require_torch
from slotstream.wire.errors import ConfigError, SampleNotFound, SlotStreamError, error_from_code
from slotstream.wire.names import DEFAULT_NAMESPACE, check_sample_id

_SEQUENCE = "sequence_index"  # In the metadata of a sample that is one of several sequences.


def capture(
    openai_client: Any,
    *,
    client: Client | None = None,
    slotstream: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    wait_s: float = 60.0,
    **request: Any,
) -> Any:
    """Sends one request to vLLM and waits for its sample: (response, sample).

    openai_client: an `openai.OpenAI` of the engine. request: what its `completions.create` takes (with `prompt`), or
    `chat.completions.create` (with `messages`), or `responses.create` (with `input`).
    slotstream: parameters of the capture, as docs/reference.md has them: `sample_id` (chosen here if left out), `namespace`,
    `tags`, `tokens`, `include_output_tokens`, `loss_mask`; of a chat the mask may be "assistant": all that the assistant wrote,
    which `tokenizer`, the engine's Hugging Face tokenizer, tells.
    wait_s: how long to wait for the sample once the text is there, at most an hour.
    client: reads the sample; None: one of $SLOTSTREAM_SERVER, else of the server that the answer names.

    n > 1: with output rows a list of samples, in the order of the choices; without, the sequences share one sample.
    stream=True: an iterator of the engine's events, whose `sample()` reads those that are left and waits for the sample.
    A list of prompts: a request each, whose samples are ID, ID.p1, ID.p2, ...: (list of responses, list of samples).

    Raises ConfigError for a request that cannot be told apart or captured, BadSampleId, what the OpenAI client raises, and what
    `Client.get` raises or the engine says of a capture that failed. An error after the text has it as `error.response`.
    """
    require_torch()
    create = _method(openai_client, request)
    body = dict(request.pop("extra_body", None) or {})
    transfer = dict(body.get("kv_transfer_params") or {})
    params = {**(transfer.get("slotstream") or {}), **(slotstream or {})}
    if params.get("loss_mask") == ASSISTANT:
        params["loss_mask"] = _assistant_spans(openai_client, tokenizer, {**request, "extra_body": body}, params)
    sample_id = check_sample_id(params.get("sample_id") or f"capture-{secrets.token_hex(12)}")

    def one(own_id: str, **changes: Any) -> _Captured:
        inner = {**params, "sample_id": own_id}
        extra = {**body, "kv_transfer_params": {**transfer, "slotstream": inner}}
        response = create(**{**request, **changes, "extra_body": extra})
        return _Captured(client, response, inner, int(request.get("n") or 1), wait_s)

    prompts = _several(request.get("prompt"))
    if prompts is not None and request.get("stream"):
        raise ConfigError("a stream is of one prompt: call capture once for each")
    if prompts is not None:
        sent = [one(sample_id if at == 0 else f"{sample_id}.p{at}", prompt=prompt) for at, prompt in enumerate(prompts)]
        responses = [captured.response for captured in sent]
        return responses, [captured.sample(responses) for captured in sent]
    captured = one(sample_id)
    if request.get("stream"):
        return CaptureStream(captured)
    return captured.response, captured.sample()


class CaptureStream:
    """The events of a streamed request, as the OpenAI client gives them. Iterate it once."""

    def __init__(self, captured: _Captured) -> None:
        self._captured = captured
        self._events = iter(captured.response)

    @property
    def sample_id(self) -> str:
        return self._captured.sample_id

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        event = next(self._events)
        self._captured.heard(event)
        return event

    def sample(self) -> Sample | list[Sample]:
        """Reads the events that are left, and waits for the sample: as `capture` returns it, and raises."""
        for _ in self:
            pass
        return self._captured.sample()

    def close(self) -> None:
        """Ends the request. Its sample is aborted, unless all its rows were there."""
        with contextlib.suppress(AttributeError):
            self._captured.response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Captured:
    """A request that was sent, and what is known of its sample."""

    def __init__(self, client: Client | None, response: Any, params: Mapping[str, Any], sequences: int, wait_s: float) -> None:
        self.response = response
        self.sample_id = str(params["sample_id"])
        self._client = client
        self._namespace = params.get("namespace")
        self._sequences = sequences
        self._wait_s = wait_s
        self._said: Mapping[str, Any] = {}
        self.heard(response)

    def heard(self, answer: Any) -> None:
        """What vLLM says of the capture stands in an answer, or in the last event of some streams."""
        for holder in (answer, getattr(answer, "response", None)):
            said = getattr(holder, "kv_transfer_params", None)
            if isinstance(said, Mapping) and isinstance(said.get("slotstream"), Mapping):
                self._said = said["slotstream"]

    def sample(self, text: Any = None) -> Sample | list[Sample]:
        """`text`: what an error keeps, if that is not this request's response alone."""
        try:
            return self._sample()
        except (SlotStreamError, ConfigError) as error:
            setattr(error, "response", self.response if text is None else text)  # noqa: B010  (no class declares it)
            raise

    def _sample(self) -> Sample | list[Sample]:
        error = self._said.get("error")
        if isinstance(error, Mapping):
            raise error_from_code(str(error.get("code")), str(error.get("message")))
        namespace = self._said.get("namespace") or self._namespace or DEFAULT_NAMESPACE
        with contextlib.ExitStack() as stack:
            client = self._client or stack.enter_context(connect(self._address()))
            first = self._first(client, namespace)
            if self._sequences == 1 or _SEQUENCE not in first.metadata:
                return first
            others = (f"{self.sample_id}.{at}" for at in range(1, self._sequences))
            return [first, *(client.get(name, namespace=namespace, wait_s=self._wait_s) for name in others)]

    def _first(self, client: Client, namespace: str) -> Sample:
        try:
            return client.get(self.sample_id, namespace=namespace, wait_s=self._wait_s)
        except SampleNotFound as error:
            sent_to = str(self._said.get("server") or "")
            if "," not in sent_to:
                raise
            # Servers with files of their own do not know what another one got.
            raise SampleNotFound(
                f"{error}; the engine sends to one of {sent_to}, and one of {client.address} was asked: servers that do not "
                "share their samples are asked one by one"
            ) from error

    def _address(self) -> str | None:
        return None if os.environ.get(SERVER_VARIABLE) else self._said.get("server")


def _method(openai_client: Any, request: Mapping[str, Any]) -> Any:
    """Which of the OpenAI client's methods the request is for. Raises ConfigError."""
    if type(openai_client).__name__.startswith("Async"):
        raise ConfigError("capture waits for its answer: give it an openai.OpenAI, and not an asynchronous client")
    methods = {
        "prompt": lambda: openai_client.completions.create,
        "messages": lambda: openai_client.chat.completions.create,
        "input": lambda: openai_client.responses.create,
    }
    asked = [name for name in methods if name in request]
    if len(asked) != 1:
        raise ConfigError(f"a request has one of prompt, messages and input, and this one {asked or 'none'}")
    return methods[asked[0]]()


def _assistant_spans(
    openai_client: Any, tokenizer: Any, request: Mapping[str, Any], params: Mapping[str, Any]
) -> list[list[int]]:
    if "messages" not in request or tokenizer is None:
        raise ConfigError(f'loss_mask "{ASSISTANT}" is of chats: give messages, and the engine\'s tokenizer')
    return request_spans(openai_client, tokenizer, request, output=bool(params.get("include_output_tokens")))


def _several(prompt: object) -> Sequence[object] | None:
    """The prompts of a list of them; None for one prompt: a text, or a list of token ids."""
    if not isinstance(prompt, list | tuple) or not prompt or all(isinstance(part, int) for part in prompt):
        return None
    return prompt
