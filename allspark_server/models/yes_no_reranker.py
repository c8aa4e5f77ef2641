"""Qwen3-Reranker as it was first published: a Qwen3ForCausalLM without modules.json.

Its model card has the prompt and the formula (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B): the probability of the
token "yes" among "yes" and "no". Only that card, README.md, tells it from the model that it was trained from, by
`pipeline_tag: text-ranking`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.weights.files import open_regular, parse_json, read_json

CARD = "README.md"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
#: the card's prompt, with the roles that rerankers' templates have
TEMPLATE = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
_TAG = re.compile(rb"^pipeline_tag: *[\"']?text-ranking[\"']? *$", re.MULTILINE)
_MOST_METADATA = 1 << 16    # bytes, at the beginning of the card


def is_yes_no_reranker(directory: str | Path) -> bool:
    """Whether a checkpoint is such a reranker. AllSparkError for files that cannot be read."""
    card, config = Path(directory, CARD), Path(directory, "config.json")
    if not os.path.lexists(card) or not os.path.lexists(config):
        return False
    if read_json(config).get("architectures") != ["Qwen3ForCausalLM"]:
        return False
    with open_regular(card) as file:
        head = file.read(_MOST_METADATA).replace(b"\r", b"").split(b"\n---", 1)[0]
    return head.startswith(b"---") and _TAG.search(head) is not None


def compared_tokens(directory: str | Path) -> tuple[int, int]:
    """The ids of "yes" and "no". AllSparkError if the tokenizer lacks one."""
    from allspark_server.tokenizer.vocabularies import tokenizer_json

    try:
        parsed = parse_json(tokenizer_json(directory))
        added = {each["content"]: each["id"] for each in parsed.get("added_tokens") or ()}
        known = {**parsed["model"]["vocab"], **added}
        found = known["yes"], known["no"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"{Path(directory, CARD)} says that the model ranks texts (pipeline_tag: text-ranking), "
                            f"but its tokenizer has no tokens 'yes' and 'no': {error!r}") from None
    if not all(isinstance(i, int) and i >= 0 for i in found):
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"the tokens 'yes' and 'no' of the tokenizer in {directory} have the ids {found}")
    return found
