"""Prompts with images: rows of all positions, right for all that vLLM's prefix cache and its steps do with the images."""

from __future__ import annotations

import json
import random
import string
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_llava
from support.idle import assert_idle
from support.stack import Stack, stack
from support.workload import MODEL_NAME

from slotstream.client import Client, Sample, connect

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(600)]

LAYER_IDS = [0, 1, 3, tiny_llava.LAYERS]
# As in test_reference.py, whose comment says why.
RELATIVE_ERROR_MAX = 0.06
OTHER_ROWS_ERROR_MIN = 0.3

Part = str | int  # A piece of text, or the picture of this number.


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.make(tmp_path_factory.mktemp("random") / "llava")


@pytest.fixture(scope="module")
def engine(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Steps of 64 tokens, as long as an image, which therefore nearly always takes two."""
    work, env = tmp_path_factory.mktemp("multimodal"), tiny_llava.loadable()
    with stack(work, model_path, LAYER_IDS, '--limit-mm-per-prompt={"image": 4}', env=env, extract=True) as running:
        yield running


@pytest.fixture
def client(engine: Stack) -> Iterator[Client]:
    with connect(engine.address) as connected:
        yield connected


def _text(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(string.ascii_letters, k=count))


def _chat(running: Stack, parts: Sequence[Part], params: dict[str, Any], max_tokens: int = 4) -> dict[str, Any]:
    """A chat request of one message; returns vLLM's answer."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": tiny_llava.data_url(tiny_llava.picture(part))}}
        for part in parts
    ]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {"slotstream": params},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.vllm_port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120.0) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def _capture(running: Stack, client: Client, parts: Sequence[Part], **params: Any) -> Sample:
    """The sample of a chat request, its token ids compared with the answer's."""
    answer = _chat(running, parts, params, max_tokens=40 if params.get("include_output_tokens") else 4)
    said = answer["kv_transfer_params"]["slotstream"]
    assert "error" not in said, said
    sample = client.get(said["sample_id"])
    tokens = answer["prompt_token_ids"]
    assert tokens == _tokens(parts)
    if params.get("include_output_tokens"):
        tokens = tokens + answer["choices"][0]["token_ids"][:-1]
    assert sample.token_ids.tolist() == tokens
    return sample


def _tokens(parts: Sequence[Part]) -> list[int]:
    """The prompt's token ids: the placeholder once for each row of an image. Text is ASCII, whose byte tokens begin at 2."""
    ascii_bytes = sorted([*range(33, 127), *range(161, 173), *range(174, 256)])
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [tiny_llava.IMAGE_TOKEN] * tiny_llava.IMAGE_TOKENS
        else:
            tokens += [2 + ascii_bytes.index(ord(char)) for char in part]
    return tokens


def _spans(sample: Sample) -> list[tuple[int, int]]:
    return [(offset, count) for _, offset, count, _ in json.loads(sample.metadata["multimodal_items"])]


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    from transformers import LlavaForConditionalGeneration

    return LlavaForConditionalGeneration.from_pretrained(model_path, dtype=torch.bfloat16).eval()


def _residual_streams(reference: Any, model_path: Path, sample: Sample, parts: Sequence[Part]) -> torch.Tensor:
    """transformers' residual stream after each of LAYER_IDS layers, float32 [tokens, layers, hidden]."""
    from transformers import AutoProcessor

    streams: dict[int, torch.Tensor] = {}

    def keep(layer_id: int, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        streams[layer_id] = tensor.reshape(-1, tensor.shape[-1]).float()

    layers = reference.model.language_model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda module, args: keep(0, args[0]))]
    hooks += [
        layer.register_forward_hook(lambda module, args, output, i=i: keep(i + 1, output)) for i, layer in enumerate(layers)
    ]
    pictures = [tiny_llava.picture(part) for part in parts if isinstance(part, int)]
    images = {}
    if pictures:
        processor: Any = AutoProcessor.from_pretrained(model_path)
        images["pixel_values"] = processor.image_processor(pictures, return_tensors="pt")["pixel_values"].to(torch.bfloat16)
    with torch.no_grad():
        reference(input_ids=sample.token_ids[None], **images)
    for hook in hooks:
        hook.remove()
    return torch.stack([streams[i] for i in LAYER_IDS], dim=1)


def _error(rows: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """How far each row is from the one it should be, relative to it: [tokens, layers]."""
    error: torch.Tensor = (rows.float() - truth.float()).norm(dim=-1) / truth.float().norm(dim=-1)
    return error


def _assert_right(reference: Any, model_path: Path, sample: Sample, parts: Sequence[Part]) -> None:
    truth = _residual_streams(reference, model_path, sample, parts)
    assert sample.hidden_states.shape == truth.shape
    assert float(_error(sample.hidden_states, truth).max()) < RELATIVE_ERROR_MAX


def test_every_row_is_that_of_transformers_whatever_the_steps_and_the_prefix_cache_do(
    engine: Stack, client: Client, reference: Any, model_path: Path
) -> None:
    """All at once, twice: the second time nearly everything is a prefix hit, images and all."""
    rng = random.Random(1)
    prompts: list[list[Part]] = [
        [_text(rng, 40)],
        [0],
        [1, _text(rng, 1)],
        [_text(rng, 33), 2, _text(rng, 50)],
        [_text(rng, 100), 3, 3, _text(rng, 5), 4, _text(rng, 200), 0],
        [_text(rng, 63), 4, 3, 2, 1],
    ]
    for turn in range(2):

        def one(i: int, turn: int = turn) -> Sample:
            return _capture(engine, client, prompts[i], sample_id=f"t{turn}-{i}", include_output_tokens=i % 2 == 1)

        with ThreadPoolExecutor(len(prompts)) as pool:
            samples = list(pool.map(one, range(len(prompts))))
        for prompt, sample in zip(prompts, samples, strict=True):
            _assert_right(reference, model_path, sample, prompt)
            images = sum(isinstance(part, int) for part in prompt)
            assert sample.metadata.get("multimodal") == (f"image:{images}" if images else None)
            # vLLM computes at least the last token again, and whole blocks of 32 tokens only.
            assert (
                turn == 0 or int(sample.metadata["prefix_hit_tokens"]) >= int(sample.metadata["prompt_tokens"]) // 32 * 32 - 32
            )
    assert_idle(engine)


def test_two_images_under_the_same_text_are_two_prompts(
    engine: Stack, client: Client, reference: Any, model_path: Path
) -> None:
    rng = random.Random(2)
    before, after = _text(rng, 70), _text(rng, 40)
    first, other = (_capture(engine, client, [before, seed, after]) for seed in (10, 11))
    again = _capture(engine, client, [before, 10, after])
    assert first.token_ids.tolist() == other.token_ids.tolist()
    for sample, seed in ((first, 10), (other, 11), (again, 10)):
        _assert_right(reference, model_path, sample, [before, seed, after])
    # Hits: nothing, the whole blocks of the text before the image, and all but the last block.
    hits = [int(sample.metadata["prefix_hit_tokens"]) for sample in (first, other, again)]
    assert hits == [0, 64, 160]
    # The rows of the image, and those after it, are of one image only: the reference tells them apart.
    error = _error(other.hidden_states, first.hidden_states)
    assert float(error[:70].max()) < RELATIVE_ERROR_MAX
    assert float(error[70 : 70 + tiny_llava.IMAGE_TOKENS].min()) > OTHER_ROWS_ERROR_MIN
    assert float(error[70 + tiny_llava.IMAGE_TOKENS :, 1:].max()) > RELATIVE_ERROR_MAX
    # What the token ids do not say: which positions are of which image.
    assert [_spans(sample) for sample in (first, other, again)] == [[(70, tiny_llava.IMAGE_TOKENS)]] * 3
    assert first.metadata["multimodal_items"] == again.metadata["multimodal_items"] != other.metadata["multimodal_items"]


def test_a_window_inside_an_image(engine: Stack, client: Client) -> None:
    parts: list[Part] = [_text(random.Random(3), 20), 20, "end"]
    whole = _capture(engine, client, parts)
    answer = _chat(engine, parts, {"sample_id": "window", "tokens": [30, 60]})
    assert answer["kv_transfer_params"]["slotstream"]["num_tokens"] == 30
    window = client.get("window")
    assert window.token_ids.tolist() == [tiny_llava.IMAGE_TOKEN] * 30
    assert float(_error(window.hidden_states, whole.hidden_states[30:60]).max()) < RELATIVE_ERROR_MAX
    assert window.metadata["token_start"] == "30"
    assert _spans(window) == [(20, tiny_llava.IMAGE_TOKENS)]  # Positions in the prompt, not in the window.
