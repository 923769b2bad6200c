"""A random-weight LLaVA: a CLIP of two layers that turns every image into 64 rows, before a Llama of four layers."""

from __future__ import annotations

import base64
import io
import os
import random
from pathlib import Path
from typing import Any

LAYERS = 4
HIDDEN = 256
IMAGE_TOKEN = 258  # Behind the 256 byte tokens, <eos> and <bos>.
IMAGE_TOKENS = 64
_IMAGE_SIZE = 64
_PATCH = 8

# The parts of a message in their order: no roles, so that the prompt's tokens are known.
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def make(path: Path) -> Path:
    """Write the checkpoint, a byte-level tokenizer and the processor to `path`; returns it. Needs transformers and Pillow."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=_IMAGE_SIZE,
        patch_size=_PATCH,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        tie_word_embeddings=False,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    # vLLM knows the vision tower's weights by the names that published checkpoints have, and transformers reads both.
    weights = load_file(path / "model.safetensors")
    old, new = "vision_tower.", "vision_tower.vision_model."
    renamed = {k if new in k else k.replace(old, new): tensor for k, tensor in weights.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    write_processor(path)
    return path


def write_processor(path: Path) -> None:
    """The tokenizer and the processor of images, to `path`, where there is a config.json."""
    from transformers import AutoTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    from slotstream.truth.model import write_tokenizer

    write_tokenizer(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    images: Any = CLIPImageProcessorPil(
        size={"shortest_edge": _IMAGE_SIZE}, crop_size={"height": _IMAGE_SIZE, "width": _IMAGE_SIZE}
    )
    processor: Any = LlavaProcessor(
        images,
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )
    processor.save_pretrained(path)


def loadable() -> dict[str, str]:
    """The environment of a vLLM that serves it."""
    paths = [str(Path(__file__).parent / "without_torchvision"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def picture(seed: int) -> Any:
    """A PIL image of coloured noise."""
    from PIL import Image

    return Image.frombytes("RGB", (_IMAGE_SIZE, _IMAGE_SIZE), random.Random(seed).randbytes(3 * _IMAGE_SIZE**2))


def data_url(image: Any) -> str:
    """The image, as a chat request carries it."""
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
