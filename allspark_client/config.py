"""AsModelConfig and GenerateConfig, their builder, and which of their values are not available yet."""
from __future__ import annotations

import copy
import re
import secrets
from dataclasses import dataclass
from typing import Any

from .errors import embeddings_not_available, nearest_name, not_available
from .fields import (
    Checked,
    as_float,
    bool_field,
    choice_field,
    custom_field,
    enum_field,
    float_field,
    int_field,
    path_field,
    str_field,
    wrong_type,
)
from .generate_checks import (
    INT32_MAX,
    check_eos,
    check_logit_bias,
    check_pooling,
    check_response_format,
    check_stop,
    check_strings,
    check_vocab,
    check_words,
)
from .types import AsCacheMode, AsEvictionStrategy, AsMHAPrefill, AsSchedulingStrategy, VocabType

INT64_MAX = 2**63 - 1
FLOAT_MAX = 3.4e38      # the sampler computes in single precision, where larger numbers are infinite
UNQUANTIZED = ("float32", "bfloat16", "float16")
GROUPED = ("int8", "int4", "w8a8", "w4a8")      # quantized formats that can have groups
WEIGHT_DTYPES = ("auto", *UNQUANTIZED, *GROUPED, "float8", "mxfp4")
GROUP_SIZES = (0, 32, 64, 128, 256, 512)


def _compute_unit(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str such as 'CPU:0'")
    if not re.fullmatch(r"(CPU|CPU_NUMA|CUDA):\d+(,\d+)*(\+CPU:\d+(,\d+)*)?", value):
        raise ValueError(f"{name}={value!r} is not known; allowed: 'CPU:0', 'CPU:0,1' (NUMA nodes), 'CUDA:0,1', "
                         "'CUDA:0+CPU:0,1' (routed experts on NUMA nodes)")
    return value


@dataclass(init=False)
class AsModelConfig(Checked):
    """Which model to load and how to run it: the argument of install_model.

    Every assignment to a field is checked and raises ValueError or TypeError; `validate` checks fields together.
    """

    model_name: str = str_field("")
    #: a Hugging Face directory, NAME.gguf, NAME.asgraph, or the id of a model on the Hub: org/name or org/name@revision
    model_path: str = path_field("")
    #: the NAME.asparam of a NAME.asgraph; otherwise empty
    weights_path: str = path_field("")
    #: "CPU:0"; "CPU:0,1" for two NUMA nodes, "CUDA:0,1" for two GPUs. "CPU:0+CPU:0,1": a mixed group, whose first rank
    #: computes the model, and two others its routed experts; "CUDA:0,1+CPU:0": two GPUs compute the model
    compute_unit: str = custom_field(_compute_unit, "CPU:0")
    #: most tokens of prompt and output together
    engine_max_length: int = int_field(2048, 1, INT32_MAX)
    #: most sequences in a step
    engine_max_batch: int = int_field(32, 1, 65536)
    #: most tokens in a prompt chunk (longer prompts are computed in several); 0: chosen
    engine_max_prefill_length: int = int_field(0, 0, INT32_MAX)
    #: threads of a rank; 0: one for each physical core of its node
    num_threads: int = int_field(0, 0, 1024)
    matmul_precision: str = choice_field("highest", ("highest", "high", "medium", "medium_bf16", "medium_fp16"))
    prefill_mode: AsMHAPrefill = enum_field(AsMHAPrefill, AsMHAPrefill.AsPrefillDefault)
    cache_mode: AsCacheMode = enum_field(AsCacheMode, AsCacheMode.AsCacheDefault)
    #: tokens in a span, the unit in which the cache is allocated
    cache_span_size: int = choice_field(32, (16, 32, 64, 128))
    enable_prefix_cache: bool = bool_field(True)
    #: how long the cache keeps an unused prefix, s
    prefix_cache_ttl: int = int_field(300, 0, INT32_MAX)
    eviction_strategy: AsEvictionStrategy = enum_field(AsEvictionStrategy, AsEvictionStrategy.MaxLength)
    scheduling_strategy: AsSchedulingStrategy = enum_field(AsSchedulingStrategy, AsSchedulingStrategy.ContextPriority)
    #: DashInfer's memory swap threshold; -1: off
    swap_threshold: int = int_field(-1, -1, INT64_MAX)
    #: write NAME.asgraph as text when serializing
    text_graph: bool = bool_field(False)
    #: largest rank of a LoRA adapter
    lora_max_rank: int = int_field(64, 1, 65536)
    #: most LoRA adapters that are loaded at once
    lora_max_num: int = int_field(5, 0, 65536)
    #: LoRA adapters that are loaded with the model, each as load_lora's argument
    lora_names: list[str] = custom_field(check_strings, factory=list)
    #: "auto": as stored. On GPUs only: "float16", where values beyond ±65504 are clamped, and "float8", e4m3 with a
    #: scale for each output channel and each token. Of checkpoints with matrices in MXFP4, such as gpt-oss', "mxfp4" is
    #: what "auto" means, and "bfloat16" dequantizes these. Of checkpoints in FP8, "bfloat16" does so, too
    weight_dtype: str = choice_field("auto", WEIGHT_DTYPES)
    #: length along K of the groups of quantized weights that share a scale; 0: one scale per output channel
    weight_group_size: int = choice_field(0, GROUP_SIZES)
    #: whether the embedding and the language-model head are quantized with the other weights
    quantize_head: bool = bool_field(True)
    #: bytes per rank for the KV cache; 0: chosen from the memory that is free
    cache_memory: int = int_field(0, 0, INT64_MAX)
    #: bytes per rank for the host cache, the prefix cache's second tier; 0: none
    host_cache_memory: int = int_field(0, 0, INT64_MAX)
    #: the host cache is a file in this directory, which outlives the process; empty: it is memory
    host_cache_dir: str = path_field("")
    #: type of keys and values with AsCacheDefault; "float16" and "float8" (e4m3) on GPUs only
    cache_dtype: str = choice_field("auto", ("auto", *UNQUANTIZED, "float8"))
    #: most tokens in a step; 0: chosen, and prompts share the time with requests that already generate
    max_step_tokens: int = int_field(0, 0, 1 << 20)
    #: inter-token latency in ms for which max_step_tokens is chosen; 0: none
    target_token_latency: float = float_field(0.0, 0.0)
    #: most requests that wait; further ones are rejected
    max_queue: int = int_field(10_000, 0, INT32_MAX)
    #: most bytes that waiting requests take; 0: chosen
    max_queue_memory: int = int_field(0, 0, INT64_MAX)
    #: type of the matrices of a vision tower: "auto" as stored, or a type of weight_dtype
    vision_weight_dtype: str = choice_field("auto", WEIGHT_DTYPES)
    #: most tokens of an image, to which larger images are reduced; 0: chosen. It sets the memory of the vision tower
    max_image_tokens: int = int_field(0, 0, 1 << 16)
    #: bytes on rank 0 in which computed images are kept for further requests that show them
    image_cache_memory: int = int_field(256 << 20, 0, INT64_MAX)
    #: in a mixed group with a GPU: rows of a step from which on the GPU copies experts from the memory of their ranks
    #: and computes them itself, with the same bits; -1: chosen from measured speeds; 0: never
    expert_streaming_rows: int = int_field(-1, -1, INT32_MAX)
    #: in a mixed group with a GPU: bytes of the GPU's memory for the routed experts that are chosen most, which the GPU
    #: computes, with the same bits; 0: none
    hot_expert_memory: int = int_field(0, 0, INT64_MAX)
    #: the model is loaded when a request names it, and unloaded when others need its memory
    on_demand: bool = bool_field(False)
    #: with on_demand: seconds without requests after which the model is unloaded; 0: only when others need its memory
    idle_timeout: float = float_field(0.0, 0.0)
    #: further names by which HTTP clients may call the model
    aliases: list[str] = custom_field(check_strings, factory=list)
    speculation: str = choice_field("off", ("off", "prompt_lookup", "draft", "mtp", "eagle"))
    #: the checkpoint of the draft model, with speculation="draft"; of the EAGLE-3 head, with "eagle"
    draft_model: str = path_field("")
    #: a file with the Jinja template of chats; empty: the checkpoint's
    chat_template: str = path_field("")
    #: whether requests may bring a chat template of their own. It is rendered in a sandbox, with limits
    trust_request_chat_template: bool = bool_field(False)

    NEUTRAL = {
        "enable_sparsity_matmul": ((False,), "sparse matrices are not offered"),
        "cache_span_num_init": ((0,), "the cache is allocated at once"),
        "cache_span_num_grow": ((0,), "the cache is allocated at once"),
        "is_lora_cfg": ((False,), "LoRA is configured with lora_max_rank and lora_max_num"),
    }

    def validate(self) -> AsModelConfig:
        """Check that the model can be installed with these fields; returns self, or raises ValueError."""
        if not self.model_name:
            raise ValueError("model_name is empty; it is the name that other calls use")
        if len(self.model_name.encode()) > 1024:
            raise ValueError(f"model_name={self.model_name[:40]!r}… has {len(self.model_name.encode())} bytes; "
                             "allowed: at most 1024")
        if not self.model_path:
            raise ValueError("model_path is empty; give a Hugging Face directory or a .asgraph file")
        if self.weight_group_size and self.weight_dtype not in GROUPED:
            raise ValueError(
                f"weight_group_size={self.weight_group_size} is for quantized weights, and weight_dtype is "
                f"{self.weight_dtype!r}; set weight_dtype to one of {', '.join(map(repr, GROUPED))}"
            )
        if 0 < self.max_step_tokens < self.engine_max_batch:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens} is less than engine_max_batch={self.engine_max_batch}: a step "
                "computes a token of every running request; raise the one or lower the other"
            )
        if self.host_cache_dir and not self.host_cache_memory:
            raise ValueError(f"host_cache_dir={self.host_cache_dir!r} needs host_cache_memory, the file's size in "
                             "bytes")
        if self.host_cache_memory and not self.enable_prefix_cache:
            raise ValueError(f"host_cache_memory={self.host_cache_memory} is the prefix cache's, which is off: set "
                             "enable_prefix_cache")
        if self.idle_timeout and not self.on_demand:
            raise ValueError(f"idle_timeout={self.idle_timeout:g} is for models on demand: set on_demand")
        if self.speculation in ("draft", "eagle") and not self.draft_model:
            raise ValueError(f"speculation={self.speculation!r} needs draft_model, a checkpoint directory")
        return self

    @property
    def on_gpus(self) -> bool:
        """Whether compute_unit names GPUs."""
        return self.compute_unit.startswith("CUDA:")

    @property
    def device_ids(self) -> list[int]:
        """The ids of compute_unit; in a mixed group, of the model's ranks."""
        return [int(i) for i in self.compute_unit.partition("+")[0].split(":")[1].split(",")]

    @property
    def expert_nodes(self) -> list[int]:
        """In a mixed group, the NUMA nodes of the ranks of experts; otherwise empty."""
        _, _, nodes = self.compute_unit.partition("+CPU:")
        return [int(node) for node in nodes.split(",") if node]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON or TOML, enums as names. from_dict reads it."""
        return {n: v.name if hasattr(v := getattr(self, n), "name") else copy.copy(v) for n in self.field_names()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AsModelConfig:
        """A config with these values; raises ValueError for an unknown key, with the nearest known name."""
        if not isinstance(values, dict):
            raise wrong_type("values", values, "a dict")
        return cls(**values)


BEAM_SEARCH = "beam search is not offered"


@dataclass(init=False)
class GenerateConfig(Checked):
    """How one request is generated.

    Every assignment to a field is checked and raises ValueError or TypeError; `validate` checks fields together. None
    stands for the engine's or the checkpoint's value. Meanings are DashInfer's where it documents them, otherwise those
    of Hugging Face's generation config.
    """

    do_sample: bool = bool_field(True)
    #: sample i of a request depends on (seed, i, position) only; None: a random seed
    seed: int | None = int_field(None, 0, 2**64 - 1)
    temperature: float = float_field(1.0, 0.0, FLOAT_MAX, above=True,
                                     hint="for the likeliest token always, set do_sample=False or top_k=1")
    #: only the top_k most likely tokens are sampled; 0: all, 1: greedy
    top_k: int = int_field(0, 0, INT32_MAX)
    #: only the most likely tokens with a total probability of top_p are sampled; 1 and, as in DashInfer, 0: all
    top_p: float = custom_field(lambda name, value: as_float(name, value, 0.0, 1.0) or 1.0, 1.0)
    #: tokens with less than min_p times the probability of the most likely one are not sampled; 0: off
    min_p: float = float_field(0.0, 0.0, 1.0)
    repetition_penalty: float = float_field(1.0, 1e-30, FLOAT_MAX)      # not 0 in single precision
    presence_penalty: float = float_field(0.0, -FLOAT_MAX, FLOAT_MAX)
    frequency_penalty: float = float_field(0.0, -FLOAT_MAX, FLOAT_MAX)
    suppress_repetition_in_generation: bool = bool_field(False)
    #: no sequence of this many tokens occurs twice; 0: off
    no_repeat_ngram_size: int = int_field(0, 0, INT32_MAX)
    #: only so many tokens at the end of the prompt are used; None: all
    truncate_prompt_tokens: int | None = int_field(None, 1, INT32_MAX)
    #: fewest tokens of prompt and output together
    min_length: int = int_field(0, 0, INT32_MAX)
    #: fewest tokens of the output
    min_new_tokens: int = int_field(0, 0, INT32_MAX)
    #: most tokens of prompt and output together; None: engine_max_length
    max_length: int | None = int_field(None, 1, INT32_MAX)
    #: most tokens of the output; None: max_length alone counts
    max_new_tokens: int | None = int_field(None, 1, INT32_MAX)
    #: False: the end-of-sequence token is ignored
    early_stopping: bool = bool_field(True)
    #: an id or a list of ids; -1: there is none; None: the checkpoint's
    eos_token_id: int | list[int] | None = custom_field(check_eos)
    stop_words_ids: list[list[int]] = custom_field(check_words, factory=list)
    #: up to 64 strings that end the output. Its text ends before the first of them that is complete; its ids end with
    #: the token that completes it, and count as generated. Special tokens have no text here, as in the output
    stop: list[str] = custom_field(check_stop, factory=list)
    #: whether the text contains the stop string that has ended it, or with skip_special_tokens=False the
    #: end-of-sequence token
    include_stop_str_in_output: bool = bool_field(False)
    #: False: special tokens have text in the output. The end-of-sequence token that ends it has none
    skip_special_tokens: bool = bool_field(True)
    #: the most tokens of reasoning, for models that mark it (such as <think>): then the mark that ends it is forced,
    #: and is not counted. Reasoning that ends earlier is not changed. None: no limit
    thinking_token_budget: int | None = int_field(None, 0, INT32_MAX)
    bad_words_ids: list[list[int]] = custom_field(check_words, factory=list)
    #: up to 64 texts whose usual tokens are not generated in this order, with or without a blank before them
    bad_words: list[str] = custom_field(check_stop, factory=list)
    #: what is added to the logits of up to 1,024 token ids, -100 to 100. Banned tokens stay banned
    logit_bias: dict[int, float] = custom_field(check_logit_bias, factory=dict)
    #: whether log probabilities come with the tokens
    logprobs: bool = bool_field(False)
    #: with logprobs, for how many of the most likely tokens
    top_logprobs: int = int_field(0, 0, 20)
    #: log probabilities of the prompt's tokens but the first, and of this many most likely tokens at each; None: none
    prompt_logprobs: int | None = int_field(None, 0, 20)
    #: the result is an embedding (of classifiers: a logit for each label) instead of tokens, namely the model's last
    #: hidden state of the prompt's last token ("last") or first one ("cls"), or the mean over all tokens ("mean");
    #: "auto": as the checkpoint says. None: tokens are generated
    pooling: str | None = custom_field(check_pooling)
    #: the LoRA adapter that the request uses; empty: none
    lora_name: str = str_field("")
    #: the form that the output must have. A mask over the vocabulary enforces it for each token, and an end-of-sequence
    #: id then ends the output. {"type": "json_object"},
    #: {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} (or the schema itself), both also with
    #: "disable_any_whitespace": True, {"type": "regex", "regex": ...}, {"type": "grammar",
    #: "grammar": ..., "syntax": "lark" | "ebnf"}, {"type": "choice", "choice": [...]}; {"type": "text"}: anything.
    #: With early_stopping=False the end is ignored, and the end-of-sequence id repeats
    response_format: dict[str, Any] | None = custom_field(check_response_format)
    #: the vocabulary for response_format; None: the checkpoint's. vocab_type: how tokens are spelled (None: as BPE's)
    vocab: dict[str, int] | None = custom_field(check_vocab)
    vocab_type: VocabType | None = enum_field(VocabType, None)
    mm_info: Any = custom_field(lambda name, value: value)
    uuid: str = str_field("")
    user_request_id: str = str_field("")
    #: higher priorities are computed first: a level is worth 30 s of waiting; levels beyond ±10 count as ±10
    priority: int = int_field(0, -INT32_MAX, INT32_MAX)
    #: a request that has not begun after this many seconds ends with an error; 0: no limit
    queue_timeout: float = float_field(0.0, 0.0)
    #: entries of the prefix cache are shared only between requests with the same salt
    cache_salt: str = str_field("")
    #: a text that the output is expected to resemble, such as the file that it is to edit: its tokens are tried as
    #: drafts while the output follows it. It changes the speed and nothing else
    prediction: str = str_field("")
    #: number of samples of the prompt
    n: int = int_field(1, 1, 1024)

    NEUTRAL = {
        "num_beams": ((1,), BEAM_SEARCH),
        "num_return_sequences": ((1,), f"{BEAM_SEARCH}; for several samples use n"),
        "length_penalty": ((1.0, 0.0), BEAM_SEARCH),
        "input_len": ((0, None), f"it is taken from the prompt, and {BEAM_SEARCH}"),
        "async": ((False, None), f"requests always are asynchronous, and {BEAM_SEARCH}"),
    }

    @classmethod
    def parse(cls, config: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None) -> GenerateConfig:
        """A checked copy of start_request's argument; raises ValueError or TypeError naming the key."""
        if config is None:
            return cls()
        if isinstance(config, ASGenerationConfigBuilder):
            return config.build()
        if isinstance(config, GenerateConfig):
            return copy.deepcopy(config).validate()
        if isinstance(config, dict):
            return cls().update(config).validate()
        raise wrong_type("generate_config", config, "a dict, a GenerateConfig or an ASGenerationConfigBuilder")

    def validate(self) -> GenerateConfig:
        """Check fields that depend on each other; returns self, or raises ValueError."""
        if self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length} exceeds max_length={self.max_length}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}")
        if self.pooling is not None:
            for name, neutral in (("n", 1), ("logprobs", False), ("prompt_logprobs", None), ("response_format", None),
                                  ("prediction", "")):
                if getattr(self, name) != neutral:
                    raise ValueError(f"pooling={self.pooling!r} returns an embedding, and nothing is sampled: "
                                     f"{name}={getattr(self, name)!r} has no meaning with it")
        return self

    def with_seed(self) -> GenerateConfig:
        """Self if the seed is set, otherwise a copy with a random seed. Clients fix the seed before sending."""
        if self.seed is not None:
            return self
        config = copy.copy(self)
        config.seed = secrets.randbits(63)
        return config


class ASGenerationConfigBuilder:
    """Builds a GenerateConfig by chained calls: update({...}), or any key by its name, such as top_k(5).

    Args:
        hf_gen_config: a Hugging Face generation config (object or dict), whose sampling keys are the initial values;
            None: GenerateConfig's defaults.
        seed: as GenerateConfig.seed.
        eos_token_id: as GenerateConfig.eos_token_id.
    """

    def __init__(self, hf_gen_config: Any = None, seed: int | None = None, eos_token_id: int | list[int] | None = None):
        self._config = GenerateConfig()
        if hf_gen_config is not None:
            given = hf_gen_config if isinstance(hf_gen_config, dict) else vars(hf_gen_config)
            keys = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size",
                    "eos_token_id")
            self.update({k: given[k] for k in keys if given.get(k) is not None})
        self.update({k: v for k, v in (("seed", seed), ("eos_token_id", eos_token_id)) if v is not None})

    def update(self, update_fields: dict[str, Any] | None = None, **more: Any) -> ASGenerationConfigBuilder:
        """Sets these keys; raises ValueError for an unknown one, with the nearest known name."""
        if update_fields is not None and not isinstance(update_fields, (dict, GenerateConfig)):
            raise wrong_type("update_fields", update_fields, "a dict")
        self._config.update({**dict(update_fields or {}), **more})
        return self

    def do_sample(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """Sets whether tokens are sampled (True) or the most likely one is taken (False)."""
        return self.update({"do_sample": flag})

    def early_stopping(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """Sets whether the end-of-sequence token ends the request."""
        return self.update({"early_stopping": flag})

    def log_probs(self, enable_logprobs: bool = True, top_logprobs: int = 0) -> ASGenerationConfigBuilder:
        """Sets whether log probabilities come with the tokens, and for how many of the most likely ones (0 to 20)."""
        return self.update({"logprobs": enable_logprobs, "top_logprobs": top_logprobs})

    def with_mm_info(self, info: Any) -> ASGenerationConfigBuilder:
        """Sets multi-modal input, which is not available yet."""
        return self.update({"mm_info": info})

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in GenerateConfig.__dataclass_fields__:
            raise AttributeError(f"ASGenerationConfigBuilder has no method {key!r}"
                                 f"{nearest_name(key, GenerateConfig.__dataclass_fields__)}")
        return lambda value: self.update({key: value})

    def build(self) -> GenerateConfig:
        """Returns the config, which later calls do not change; raises ValueError if keys contradict."""
        return copy.deepcopy(self._config).validate()


#: of fields of DashInfer, the one value that this project has, and why
_ONLY = {
    "matmul_precision": ("highest", "weight_dtype sets the compute type"),
    "prefill_mode": (AsMHAPrefill.AsPrefillDefault, "there is one kernel for prompts"),
    "eviction_strategy": (AsEvictionStrategy.MaxLength, "the latest request of the lowest priority is preempted"),
    "scheduling_strategy": (AsSchedulingStrategy.ContextPriority, "running requests and prompts share every step"),
    "swap_threshold": (-1, "the engine swaps to host_cache_memory where that is cheaper than computing again"),
}


def check_available(config: AsModelConfig | GenerateConfig) -> None:
    """Raise ALLSPARK_INVALID_CALL_ERROR for values that the API names but that are not available yet."""
    if isinstance(config, AsModelConfig):
        for name, (only, why) in _ONLY.items():
            value = getattr(config, name)
            if value != only:
                given, allowed = (getattr(v, "name", v) for v in (value, only))
                raise not_available(f"{name}={given} (allowed: {allowed}; {why})")
    else:
        if config.mm_info is not None:
            raise embeddings_not_available("mm_info")
