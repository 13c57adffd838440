"""Folders of autoencoders and text encoders: diffusers' and transformers' own classes, tiny, with random weights."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_folder(folder: Path) -> Path:
    from diffusers import AutoencoderTiny

    torch.manual_seed(0)
    AutoencoderTiny(latent_channels=4).save_pretrained(folder)
    return folder


def kl_folder(folder: Path) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
    ).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, length: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "a", "photo", "of", "goldfish"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    ).save_pretrained(folder)


def clip_folder(folder: Path) -> Path:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=16, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    CLIPTextModel(config).save_pretrained(folder)
    save_tokenizer(folder, 77)
    return folder


def t5_folder(folder: Path) -> Path:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=16, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    save_tokenizer(folder, 512)
    return folder
