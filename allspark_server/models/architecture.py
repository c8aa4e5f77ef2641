"""The declaration of an architecture in its family's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from allspark_server.models.draft_heads import DraftHead
from allspark_server.models.fields import MAX_SIZE, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import PLAIN_ROPE_TYPES, ExpertConfig, ModelConfig, RopeConfig

# For families whose code is published in the checkpoint. That code is never run. The family's file implements it, and
# rejects settings that it does not implement.
OWN_CODE = "a float64 reference; DashInfer 1.3.0; transformers' model of the same numbers, if any"


@dataclass(frozen=True)
class Architecture:
    """One name of config.json's `architectures`: the network, and how its config.json differs from Llama's.

    Most fields are the defaults that transformers' config class has for absent fields of config.json.

    build: makes the graph of ops.
    served: the model families, for the table of supported models.
    checked: the implementation that logits and greedy output were compared with.
    """

    build: Callable[[ModelConfig], Graph]
    model_type: str
    served: str
    checked: str = "transformers"
    kv_heads_required: bool = True
    head_dim: int | None = None           # None: hidden_size // num_attention_heads
    has_bias_fields: bool = False         # attention_bias and mlp_bias are read
    qkv_bias_field: bool = False          # qkv_bias (default true) is read instead of attention_bias
    attention_bias: bool = False          # default of attention_bias
    activation: tuple[str, ...] = ("silu", "swish")  # accepted names of the activation function
    windows: bool = False                 # sliding_window is served; otherwise it is rejected
    window: int | None = None             # default of sliding_window
    window_always: bool = False           # sliding_window applies unless use_sliding_window says otherwise
    window_pattern: int | None = None     # without layer_types: every n-th layer has no window; None: no such
    layer_types: bool = True              # layer_types is read; False: all layers are alike
    nope_layers: bool = False             # no_rope_layers is read: layers without rotary embedding
    nope_globals: bool = False            # with a sliding_window, layers without it have no rotary embedding
    rope_theta: float = RopeConfig.theta
    rope_types: tuple[str, ...] = PLAIN_ROPE_TYPES
    partial_rotary: float | None = None   # default of partial_rotary_factor; None: only 1 is served
    local_theta: float | None = None      # default base of the rotary embedding that layers with a window have for
                                          # themselves; 0: that of the others; None: they share the others' embedding
    tied: bool = False                    # default of tie_word_embeddings
    experts: Callable[[Fields, int], ExpertConfig | None] | None = None  # reads the fields of experts, given the layer
                                                                         # count; None: it has none
    more: Callable[[Fields], dict[str, Any]] | None = None        # reads further fields of ModelConfig
    translate: Callable[[Fields], Fields] | None = None           # renames the fields of a config.json of its own kind
    tower: Callable[[Fields], ModelConfig] | None = None          # reads the vision tower of models that see
    no_images_reason: str = ""            # of models that see, of which only the text is served: why images are refused
    draft_head: DraftHead | None = None   # the draft head that checkpoints may bring
    unused: tuple[str, ...] = ()          # how the names of tensors begin that its checkpoints have and it does not
                                          # use; {number} stands for the number of its layers
    stored_as: str = ""                   # the view of the checkpoint's tensors that the graph uses (VIEWS in
                                          # weights/views.py); "": the tensors as they are


def translated(fields: Fields, **values: Any) -> Fields:
    """The same config.json with some fields replaced."""
    return Fields({**fields.values, **values}, fields.path)


def text_part(fields: Fields) -> Fields:
    """The text part of the config.json of a multimodal checkpoint."""
    names = ("tie_word_embeddings", "quantization_config", "eos_token_id")
    outer: dict[str, Any] = {name: fields.values[name] for name in names if name in fields.values}
    return Fields({**outer, **fields.need("text_config", dict)}, fields.path, "text_config.")


def reject_other_values(fields: Fields, served: dict[str, Any]) -> None:
    """Raises AllSparkError for a field that is present with another value than the served one."""
    for name, value in served.items():
        found = fields.values.get(name, value)
        if found != value and found is not None:
            raise fields.error(name, f"is {found!r}: only {value!r} is served")


def label_count(fields: Fields) -> int:
    """The outputs of a classifier, as transformers counts them."""
    names = fields.get("id2label", dict)
    count = len(names) if names else fields.get("num_labels", int, 2)
    if not 0 < count <= MAX_SIZE:
        raise fields.error("id2label", f"has {count} labels: expected at least 1")
    return count


def with_classifiers(architectures: dict[str, Architecture], *names: str) -> dict[str, Architecture]:
    """The architectures, and for each of `names`, such as "Qwen3", the classifier: the last row's hidden state, times
    the matrix `score` (rerankers and reward models).
    """
    found = dict(architectures)
    for name in names:
        base = architectures[f"{name}ForCausalLM"]

        def more(fields: Fields, base: Architecture = base) -> dict[str, Any]:
            return {**(base.more(fields) if base.more else {}), "labels": label_count(fields)}

        found[f"{name}ForSequenceClassification"] = replace(base, served=f"{base.served}, classifiers", more=more)
    return found
