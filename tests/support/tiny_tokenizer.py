"""A byte-level BPE tokenizer for tiny checkpoints."""
from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINING_TEXT = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps on",
    "one two three four five six seven eight nine ten 0123456789",
    "naïve café, größer als übermut; 你好,世界。 こんにちは 🙂🙃",
] * 4


def add_tokenizer(directory: Path, vocab_size: int, marks: tuple[str, ...] = ()) -> None:
    """Writes a byte-level BPE tokenizer with a chat template beside a checkpoint; its ids are below `vocab_size`.
    `marks`: further special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
