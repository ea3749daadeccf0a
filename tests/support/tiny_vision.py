"""A tiny LLaVA with seeded random weights, and pictures for it. vLLM serves it with `--model-impl transformers`."""

from pathlib import Path

import numpy as np
import torch
import trl
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from tests.support.tiny import build_chat_tokenizer, build_model, build_tokenizer


IMAGE, CHAT_IMAGE = "<image>", "<|image_pad|>"
# Without role markers, so that prompts stay short. TRL wants a token between two images.
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image> {% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
)


def build_processor() -> LlavaProcessor:
    """A processor with 16 tokens for each image of 32 by 32 pixels."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return _processor(tokenizer, TEMPLATE, IMAGE)


def _processor(tokenizer: PreTrainedTokenizerFast, template: str, image_token: str) -> LlavaProcessor:
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1, image_token=image_token,
    )  # fmt: skip


def build_chat_processor() -> LlavaProcessor:
    """The same with the chat template of Qwen3-VL, which renders calls of tools and images among their results."""
    tokenizer = build_chat_tokenizer()
    markers = ("<|vision_start|>", "<|vision_end|>", CHAT_IMAGE)
    tokenizer.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_vl.jinja"
    return _processor(tokenizer, template.read_text(), CHAT_IMAGE)


def save_tiny_vision_model(path: str | Path) -> str:
    """Save model and processor into the folder `path`, and return it."""
    processor = build_processor()
    build_vision_model(processor).save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


def build_vision_model(processor: LlavaProcessor) -> LlavaForConditionalGeneration:
    """A float32 model of 0.2 million parameters. The global random state stays."""
    text = build_model(tie_word_embeddings=False, vocab_size=len(processor.tokenizer)).config.to_dict()
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = LlavaConfig(
        vision_config=vision, text_config=Qwen3Config(**text), image_token_id=processor.image_token_id,
        image_seq_length=16, dtype="float32", tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 3  # so that the image shows in the log-probabilities
        # An image token is never sampled: transformers would look for its image.
        model.model.language_model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[processor.image_token_id] = 0.0
        model.lm_head.weight[processor.image_token_id, 0] = -30.0
    return model


def picture(seed: int) -> Image.Image:
    """Noise of 56 by 40 pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8))
