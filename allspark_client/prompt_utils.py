"""Prompt formats for callers without a tokenizer's own chat template."""
from __future__ import annotations


class PromptTemplate:
    """Formats a user's message as one string."""

    @staticmethod
    def apply_chatml_template(inputs: str, system: str = "You are a helpful assistant.") -> str:
        """The user's message `inputs` as a ChatML conversation, ending where the assistant answers."""
        if not isinstance(inputs, str):
            raise TypeError(f"inputs must be a str, not {type(inputs).__name__}")
        turns = (("system", system), ("user", inputs))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return text + "<|im_start|>assistant\n"
