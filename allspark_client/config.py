"""AsModelConfig and GenerateConfig, and what of them is not built yet."""
from __future__ import annotations

import copy
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from .errors import nearest_name, not_available
from .fields import (
    Checked,
    as_float,
    as_int,
    bool_field,
    choice_field,
    custom_field,
    enum_field,
    float_field,
    int_field,
    path_field,
    str_field,
    valid_unicode,
    wrong_type,
)
from .types import AsCacheMode, AsEvictionStrategy, AsMHAPrefill, AsSchedulingStrategy, VocabType

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT_MAX = 3.4e38      # the sampler takes floats in single precision, where larger ones are infinite
#: of each of stop_words_ids, bad_words_ids and eos_token_id: every step looks for them after every token
MAX_WORDS, MAX_WORD_IDS = 1024, 256
#: stop strings and their characters: each is looked for in every character of the output
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
MAX_LOGIT_BIAS = 100.0
UNQUANTIZED = ("float32", "bfloat16", "float16")
GROUPED = ("int8", "int4", "w8a8", "w4a8")      # quantized, in groups if wanted
WEIGHT_DTYPES = ("auto", *UNQUANTIZED, *GROUPED, "float8")
GROUP_SIZES = (0, 32, 64, 128, 256, 512)


def _compute_unit(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str such as 'CPU:0'")
    if not re.fullmatch(r"(CPU|CPU_NUMA|CUDA):\d+(,\d+)*", value):
        raise ValueError(f"{name}={value!r} is no compute unit; allowed: 'CPU:0', 'CPU:0,1' (NUMA nodes), 'CUDA:0,1'")
    return value


def _strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise wrong_type(name, value, "a list of str")
    return list(value)


@dataclass(init=False)
class AsModelConfig(Checked):
    """What to load and how to run it. Every assignment is checked; `validate` checks what concerns several fields."""

    model_name: str = str_field("")
    #: a Hugging Face directory, NAME.gguf, NAME.asgraph, or a model's id on the Hub, such as org/name or org/name@revision
    model_path: str = path_field("")
    #: NAME.asparam; empty for a Hugging Face directory
    weights_path: str = path_field("")
    #: "CPU:0"; "CPU:0,1" is two NUMA nodes, "CUDA:0,1" two GPUs
    compute_unit: str = custom_field(_compute_unit, "CPU:0")
    #: tokens of prompt and output together
    engine_max_length: int = int_field(2048, 1, INT32_MAX)
    #: sequences in a step
    engine_max_batch: int = int_field(32, 1, 65536)
    #: tokens in a prompt chunk, no limit on prompts; 0: chosen
    engine_max_prefill_length: int = int_field(0, 0, INT32_MAX)
    #: threads a rank; 0: the node's physical cores
    num_threads: int = int_field(0, 0, 1024)
    matmul_precision: str = choice_field("highest", ("highest", "high", "medium", "medium_bf16", "medium_fp16"))
    prefill_mode: AsMHAPrefill = enum_field(AsMHAPrefill, AsMHAPrefill.AsPrefillDefault)
    cache_mode: AsCacheMode = enum_field(AsCacheMode, AsCacheMode.AsCacheDefault)
    #: tokens in a span
    cache_span_size: int = choice_field(32, (16, 32, 64, 128))
    enable_prefix_cache: bool = bool_field(True)
    #: seconds an unused prefix stays
    prefix_cache_ttl: int = int_field(300, 0, INT32_MAX)
    eviction_strategy: AsEvictionStrategy = enum_field(AsEvictionStrategy, AsEvictionStrategy.MaxLength)
    scheduling_strategy: AsSchedulingStrategy = enum_field(AsSchedulingStrategy, AsSchedulingStrategy.ContextPriority)
    #: DashInfer's memory swap threshold; -1: off
    swap_threshold: int = int_field(-1, -1, INT64_MAX)
    #: write .asgraph as text
    text_graph: bool = bool_field(False)
    #: of LoRA adapters; and how many may be loaded at once
    lora_max_rank: int = int_field(64, 1, 65536)
    lora_max_num: int = int_field(5, 0, 65536)
    #: adapters that are loaded with the model, as load_lora takes them
    lora_names: list[str] = custom_field(_strings, factory=list)
    #: on GPUs alone: "float16" (what is beyond 65504 is cut to it) and "float8" (e4m3, a scale for each output channel,
    #: and for each token)
    weight_dtype: str = choice_field("auto", WEIGHT_DTYPES)
    #: of quantized weights. 0: per output channel; otherwise length of the groups along K
    weight_group_size: int = choice_field(0, GROUP_SIZES)
    #: of quantized weights: whether the embedding and the language-model head are quantized as well
    quantize_head: bool = bool_field(True)
    #: bytes per rank for the KV cache; 0: chosen
    cache_memory: int = int_field(0, 0, INT64_MAX)
    #: bytes per rank for the prefix cache's second tier; 0: none, as the first is in the host's memory already
    host_cache_memory: int = int_field(0, 0, INT64_MAX)
    #: the second tier is a file in this directory, which outlives the process; empty: it is memory
    host_cache_dir: str = path_field("")
    #: for AsCacheDefault; "float16" and "float8" (e4m3) on GPUs alone
    cache_dtype: str = choice_field("auto", ("auto", *UNQUANTIZED, "float8"))
    #: token budget of a step; 0: chosen, and while some stream, prompts share the time with them
    max_step_tokens: int = int_field(0, 0, 1 << 20)
    #: inter-token latency in ms that the token budget is chosen to hold; 0: none given
    target_token_latency: float = float_field(0.0, 0.0)
    #: requests that may wait before new ones are refused
    max_queue: int = int_field(10_000, 0, INT32_MAX)
    #: bytes that they may take; 0: chosen
    max_queue_memory: int = int_field(0, 0, INT64_MAX)
    speculation: str = choice_field("off", ("off", "prompt_lookup", "draft"))
    #: checkpoint for speculation="draft"
    draft_model: str = path_field("")

    NEUTRAL = {
        "enable_sparsity_matmul": ((False,), "sparse matrices are not offered"),
        "cache_span_num_init": ((0,), "the cache is allocated at once"),
        "cache_span_num_grow": ((0,), "the cache is allocated at once"),
        "is_lora_cfg": ((False,), "LoRA is configured with lora_max_rank and lora_max_num"),
    }

    def validate(self) -> AsModelConfig:
        """Check what is needed to install the model; returns self, raises ValueError."""
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
            raise ValueError(f"host_cache_dir={self.host_cache_dir!r} needs host_cache_memory, the file's size in bytes")
        if self.host_cache_memory and not self.enable_prefix_cache:
            raise ValueError(f"host_cache_memory={self.host_cache_memory} is the prefix cache's, which is off: set "
                             "enable_prefix_cache")
        if self.speculation == "draft" and not self.draft_model:
            raise ValueError("speculation='draft' needs draft_model, a checkpoint directory")
        return self

    @property
    def on_gpus(self) -> bool:
        """Whether compute_unit names GPUs."""
        return self.compute_unit.startswith("CUDA:")

    @property
    def device_ids(self) -> list[int]:
        """The ids of compute_unit."""
        return [int(i) for i in self.compute_unit.split(":")[1].split(",")]

    def to_dict(self) -> dict[str, Any]:
        """Plain values (enums as names), fit for JSON and TOML; from_dict's inverse."""
        return {n: v.name if hasattr(v := getattr(self, n), "name") else copy.copy(v) for n in self.field_names()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AsModelConfig:
        """A config of these keys; an unknown one is a ValueError with the nearest known name."""
        if not isinstance(values, dict):
            raise wrong_type("values", values, "a dict")
        return cls(**values)


def _eos(name: str, value: Any) -> int | list[int]:
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_WORDS:
            raise ValueError(f"{name} has {len(value)} ids; allowed: at most {MAX_WORDS}")
        return [as_int(f"{name}[{i}]", v, 0, INT32_MAX) for i, v in enumerate(value)]
    return as_int(name, value, -1, INT32_MAX)


def _words(name: str, value: Any) -> list[list[int]]:
    """A list of non-empty lists of token ids."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise wrong_type(name, value, "a list of lists of token ids")
    if len(value) > MAX_WORDS:
        raise ValueError(f"{name} has {len(value)} words; allowed: at most {MAX_WORDS}")
    words = []
    for i, word in enumerate(value):
        if hasattr(word, "tolist"):
            word = word.tolist()
        if not isinstance(word, (list, tuple)):
            raise wrong_type(f"{name}[{i}]", word, "a list of token ids")
        if not word:
            raise ValueError(f"{name}[{i}] is empty; a word needs at least one token id")
        if len(word) > MAX_WORD_IDS:
            raise ValueError(f"{name}[{i}] has {len(word)} ids; allowed: at most {MAX_WORD_IDS}")
        words.append([as_int(f"{name}[{i}][{j}]", v, 0, INT32_MAX) for j, v in enumerate(word)])
    return words


def _stop(name: str, value: Any) -> list[str]:
    """A str stands for a list of it."""
    value = [value] if isinstance(value, str) else value
    strings = _strings(name, value)
    if len(strings) > MAX_STOPS:
        raise ValueError(f"{name} has {len(strings)} strings; allowed: at most {MAX_STOPS}")
    for i, string in enumerate(strings):
        if not 0 < len(string) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"{name}[{i}] has {len(string)} characters; allowed: 1 to {MAX_STOP_CHARACTERS}")
        valid_unicode(f"{name}[{i}]", string)
    return strings


#: what a response_format may hold beside "type", by its type: the field that it must hold, and those that it may
RESPONSE_FORMATS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "text": (None, ()),
    "json_object": (None, ("disable_any_whitespace",)),
    "json_schema": ("json_schema", ("disable_any_whitespace",)),
    "regex": ("regex", ()),
    "grammar": ("grammar", ("syntax",)),
    "choice": ("choice", ()),
}
GRAMMAR_SYNTAXES = ("lark", "ebnf")


def _response_format(name: str, value: Any) -> dict[str, Any]:
    """Checks its form; what its schema, expression or grammar says is checked by the engine."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a dict such as {'type': 'json_object'}")
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{name} is not plain JSON: {e}") from None
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        raise ValueError(f"{name}.type={kind!r} is not known; allowed: {', '.join(RESPONSE_FORMATS)}"
                         f"{nearest_name(str(kind), RESPONSE_FORMATS)}")
    needed, more = RESPONSE_FORMATS[kind]
    for key in value:
        if key not in ("type", needed, *more):
            raise ValueError(f"{name}.{key} does not belong to type={kind!r}")
    if needed is not None and needed not in value:
        raise ValueError(f"{name}.{needed} is missing; type={kind!r} needs it")
    held = value.get(needed)
    if kind == "json_schema":
        _schema(f"{name}.json_schema", held)
    elif kind in ("regex", "grammar") and (not isinstance(held, str) or not held):
        raise wrong_type(f"{name}.{kind}", held, "a str that is not empty")
    elif kind == "choice" and not (isinstance(held, list) and held and all(isinstance(v, str) for v in held)):
        raise wrong_type(f"{name}.choice", held, "a list of one or more str")
    if value.get("syntax", "lark") not in GRAMMAR_SYNTAXES:
        raise ValueError(f"{name}.syntax={value['syntax']!r} is not known; allowed: {', '.join(GRAMMAR_SYNTAXES)}")
    if not isinstance(value.get("disable_any_whitespace", False), bool):
        raise wrong_type(f"{name}.disable_any_whitespace", value["disable_any_whitespace"], "a bool")
    return value


def _schema(name: str, value: Any) -> None:
    """A JSON schema, itself or in OpenAI's {"name": ..., "strict": ..., "schema": ...}, or the text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{name} is not valid JSON: {e}") from None
    if isinstance(value, dict) and "schema" in value and set(value) <= {"name", "description", "schema", "strict"}:
        name, value = f"{name}.schema", value["schema"]
    if not isinstance(value, (dict, bool)):
        raise wrong_type(name, value, "a JSON schema: a dict")


def _vocab(name: str, value: Any) -> dict[str, int]:
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        value = {token: i for i, token in enumerate(value)}
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a dict of token to id, or a list of tokens")
    return {str(k): as_int(f"{name}[{k!r}]", v, 0, INT32_MAX) for k, v in value.items()}


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a dict of token id to a number")
    if len(value) > MAX_WORDS:
        raise ValueError(f"{name} has {len(value)} ids; allowed: at most {MAX_WORDS}")
    biases = {}
    for token, bias in value.items():
        if isinstance(token, str) and token.isascii() and token.isdigit():      # as JSON has keys
            token = int(token)
        token = as_int(f"a key of {name}", token, 0, INT32_MAX)
        biases[token] = as_float(f"{name}[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return biases


POOLINGS = ("last", "mean")


def _pooling(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str")
    if value not in POOLINGS:
        raise ValueError(f"{name}={value!r} is not offered; allowed: {', '.join(map(repr, POOLINGS))}, or None")
    return value


BEAM_SEARCH = "beam search is not offered"


@dataclass(init=False)
class GenerateConfig(Checked):
    """How one request is generated. Every assignment is checked. None: the engine's or the checkpoint's value."""

    do_sample: bool = bool_field(True)
    #: None: random
    seed: int | None = int_field(None, 0, 2**64 - 1)
    temperature: float = float_field(1.0, 0.0, FLOAT_MAX, above=True,
                                     hint="for the likeliest token always, set do_sample=False or top_k=1")
    #: 0: off
    top_k: int = int_field(0, 0, INT32_MAX)
    #: 1 and, as in DashInfer, 0: off
    top_p: float = custom_field(lambda name, value: as_float(name, value, 0.0, 1.0) or 1.0, 1.0)
    #: tokens less than min_p times as probable as the likeliest are not drawn; 0: off
    min_p: float = float_field(0.0, 0.0, 1.0)
    repetition_penalty: float = float_field(1.0, 1e-30, FLOAT_MAX)      # in single precision not 0
    presence_penalty: float = float_field(0.0, -FLOAT_MAX, FLOAT_MAX)
    frequency_penalty: float = float_field(0.0, -FLOAT_MAX, FLOAT_MAX)
    suppress_repetition_in_generation: bool = bool_field(False)
    #: 0: off
    no_repeat_ngram_size: int = int_field(0, 0, INT32_MAX)
    #: prompt and output together
    min_length: int = int_field(0, 0, INT32_MAX)
    #: prompt and output together; None: the engine's
    max_length: int | None = int_field(None, 1, INT32_MAX)
    #: output only; None: as max_length says
    max_new_tokens: int | None = int_field(None, 1, INT32_MAX)
    #: False: the end-of-sequence token is ignored
    early_stopping: bool = bool_field(True)
    #: an id or a list of ids; -1: there is none; None: the checkpoint's
    eos_token_id: int | list[int] | None = custom_field(_eos)
    stop_words_ids: list[list[int]] = custom_field(_words, factory=list)
    #: up to 64 strings that end the output: its text stops before the first of them to be complete, its ids with the
    #: token that completed it, and those count as generated. Special tokens have no text here, as in the output
    stop: list[str] = custom_field(_stop, factory=list)
    bad_words_ids: list[list[int]] = custom_field(_words, factory=list)
    #: of up to 1,024 token ids: what is added to their logits, -100 to 100. What is banned stays banned
    logit_bias: dict[int, float] = custom_field(_logit_bias, factory=dict)
    logprobs: bool = bool_field(False)
    top_logprobs: int = int_field(0, 0, 20)
    #: the log probability of each token of the prompt but the first, with so many of the likeliest; None: not wanted
    prompt_logprobs: int | None = int_field(None, 0, 20)
    #: "last" or "mean": nothing is generated, and the result is an embedding: the model's last hidden state of the
    #: prompt's last token, or the mean of all tokens'. None: tokens are generated
    pooling: str | None = custom_field(_pooling)
    lora_name: str = str_field("")
    #: what the output must be, by a mask over the vocabulary for each token; it then ends with an end-of-sequence id.
    #: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} (or the schema
    #: itself), both also with "disable_any_whitespace": True, {"type": "regex", "regex": ...}, {"type": "grammar",
    #: "grammar": ..., "syntax": "lark" | "ebnf"}, {"type": "choice", "choice": [...]}; {"type": "text"}: anything.
    #: With early_stopping=False the end is ignored, as ever, and comes again and again
    response_format: dict[str, Any] | None = custom_field(_response_format)
    #: of the grammar, instead of the checkpoint's vocabulary; vocab_type: how its tokens are spelled (None: as BPE's)
    vocab: dict[str, int] | None = custom_field(_vocab)
    vocab_type: VocabType | None = enum_field(VocabType, None)
    mm_info: Any = custom_field(lambda name, value: value)
    uuid: str = str_field("")
    user_request_id: str = str_field("")
    #: higher goes first: one level is worth 30 s of waiting, and levels beyond ±10 count as ±10
    priority: int = int_field(0, -INT32_MAX, INT32_MAX)
    #: seconds after which a request that has not begun ends with an error; 0: it waits however long it takes
    queue_timeout: float = float_field(0.0, 0.0)
    #: prefix-cache entries are shared only within one salt
    cache_salt: str = str_field("")
    #: samples of the prompt
    n: int = int_field(1, 1, 1024)

    NEUTRAL = {
        "num_beams": ((1,), BEAM_SEARCH),
        "num_return_sequences": ((1,), f"{BEAM_SEARCH}; for several samples use n"),
        "length_penalty": ((1.0, 0.0), BEAM_SEARCH),
        "input_len": ((0, None), f"it is taken from the prompt, and {BEAM_SEARCH}"),
        "async": ((False, None), f"requests always are asynchronous, and {BEAM_SEARCH}"),
    }

    @classmethod
    def parse(cls, config: dict | GenerateConfig | ASGenerationConfigBuilder | None) -> GenerateConfig:
        """A checked copy of what start_request was given; raises ValueError or TypeError naming the key."""
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
        """Check what concerns several fields; returns self, raises ValueError."""
        if self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length} exceeds max_length={self.max_length}")
        if self.pooling is not None:
            for name, neutral in (("n", 1), ("logprobs", False), ("prompt_logprobs", None), ("response_format", None)):
                if getattr(self, name) != neutral:
                    raise ValueError(f"pooling={self.pooling!r} makes an embedding, for which nothing is drawn: "
                                     f"{name}={getattr(self, name)!r} has no meaning with it")
        return self

    def with_seed(self) -> GenerateConfig:
        """Self if the seed is set, otherwise a copy with a random one (a client fixes it before it sends)."""
        if self.seed is not None:
            return self
        config = copy.copy(self)
        config.seed = secrets.randbits(63)
        return config


class ASGenerationConfigBuilder:
    """Builds a GenerateConfig by chained calls: update({...}), or any key by its name, such as top_k(5)."""

    def __init__(self, hf_gen_config: Any = None, seed: int | None = None, eos_token_id: int | list[int] | None = None):
        """Start from defaults, or from the sampling keys of a Hugging Face generation config (object or dict)."""
        self._config = GenerateConfig()
        if hf_gen_config is not None:
            given = hf_gen_config if isinstance(hf_gen_config, dict) else vars(hf_gen_config)
            keys = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size",
                    "eos_token_id")
            self.update({k: given[k] for k in keys if given.get(k) is not None})
        self.update({k: v for k, v in (("seed", seed), ("eos_token_id", eos_token_id)) if v is not None})

    def update(self, update_fields: dict[str, Any] | None = None, **more: Any) -> ASGenerationConfigBuilder:
        """Change these keys; an unknown one is a ValueError with the nearest known name."""
        if update_fields is not None and not isinstance(update_fields, (dict, GenerateConfig)):
            raise wrong_type("update_fields", update_fields, "a dict")
        self._config.update({**dict(update_fields or {}), **more})
        return self

    def do_sample(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """Draw tokens (True) or take the best (False)."""
        return self.update({"do_sample": flag})

    def early_stopping(self, flag: bool = True) -> ASGenerationConfigBuilder:
        """Whether the end-of-sequence token ends the request."""
        return self.update({"early_stopping": flag})

    def log_probs(self, enable_logprobs: bool = True, top_logprobs: int = 0) -> ASGenerationConfigBuilder:
        """Whether logprobs come with the tokens, and how many alternatives."""
        return self.update({"logprobs": enable_logprobs, "top_logprobs": top_logprobs})

    def with_mm_info(self, info: Any) -> ASGenerationConfigBuilder:
        """Multi-modal input."""
        return self.update({"mm_info": info})

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in GenerateConfig.__dataclass_fields__:
            raise AttributeError(f"ASGenerationConfigBuilder has no method {key!r}"
                                 f"{nearest_name(key, GenerateConfig.__dataclass_fields__)}")
        return lambda value: self.update({key: value})

    def build(self) -> GenerateConfig:
        """A config that later calls on this builder do not change; raises ValueError if keys contradict each other."""
        return copy.deepcopy(self._config).validate()


#: values of DashInfer's fields that this project has, and what it always does
_ONLY = {
    "matmul_precision": ("highest", "weight_dtype says what is computed in"),
    "prefill_mode": (AsMHAPrefill.AsPrefillDefault, "there is one kernel for prompts"),
    "eviction_strategy": (AsEvictionStrategy.MaxLength, "the request that came last gives way, by priority"),
    "scheduling_strategy": (AsSchedulingStrategy.ContextPriority, "running requests and prompts share every step"),
    "swap_threshold": (-1, "what is swapped to host_cache_memory is decided by what it costs"),
}


def check_available(config: AsModelConfig | GenerateConfig) -> None:
    """Raise ALLSPARK_INVALID_CALL_ERROR for what has a name in the API but is not built yet."""
    if isinstance(config, AsModelConfig):
        for name, (only, why) in _ONLY.items():
            value = getattr(config, name)
            if value != only:
                given, allowed = (getattr(v, "name", v) for v in (value, only))
                raise not_available(f"{name}={given} (allowed: {allowed}; {why})")
    else:
        if config.mm_info is not None:
            raise not_available("mm_info (multi-modal input)")
