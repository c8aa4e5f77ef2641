"""Enums and result types of the public API. Plain data: nothing here talks to an engine."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum, IntEnum
from typing import Any, NamedTuple


class GenerateRequestStatus(IntEnum):
    """Where a request is. The last three are final."""

    Init = 0                 #: waiting to be scheduled
    ContextFinished = 1      #: the prompt has been computed
    Generating = 2
    GenerateFinished = 3     #: ended by end-of-sequence, a stop word or a length limit
    GenerateInterrupted = 4  #: stopped by stop_request, stop_model, release or a vanished client
    InternalError = 5        #: failed; ResultQueue.Get raises why

    @property
    def final(self) -> bool:
        """True once nothing more can come."""
        return self >= GenerateRequestStatus.GenerateFinished


class TargetDevice(Enum):
    """What AsModelRuntimeConfigBuilder.compute_unit places a model on."""

    CUDA = "CUDA"
    CPU = "CPU"
    CPU_NUMA = "CPU_NUMA"


class RoPEScaleMethod(Enum):
    """How HuggingFaceModel.set_rope_scale_method stretches the rotary embedding."""

    NO_SCALE = 0
    YaRN = 3
    NTK = 4     #: dynamic: with the context's length


class AsCacheMode(IntEnum):
    """How keys and values are stored."""

    AsCacheDefault = 0
    AsCacheQuantI8 = 1
    AsCacheQuantU4 = 2


class AsMHAPrefill(IntEnum):
    """DashInfer's choice of prefill kernel; this project has one, the default."""

    AsPrefillDefault = 0
    AsPrefillFlashV2 = 10
    AsPrefillXformer = 20


class AsEvictionStrategy(IntEnum):
    """Which running request gives way when the cache is full."""

    MaxLength = 0
    Random = 1


class AsSchedulingStrategy(IntEnum):
    """Whether prompts go before running requests or share the step with them."""

    ContextPriority = 0
    Balance = 1


class VocabType(IntEnum):
    """Tokenizer family of the `vocab` given for guided output."""

    VOCAB_TYPE_WPM = 0
    VOCAB_TYPE_SPM = 1
    VOCAB_TYPE_UGM = 2
    VOCAB_TYPE_BPE = 3


@dataclass
class GeneratedElements:
    """Tokens of one request (of one sample of it), in the order they were generated.

    All lists that are not empty have one entry a token of `ids_from_generate`.
    """

    ids_from_generate: list[int] = field(default_factory=list)
    #: per token the top_logprobs best (id, logprob) pairs, best first; empty unless logprobs=True
    log_probs_list: list[list[tuple[int, float]]] = field(default_factory=list)
    #: logprob of each token; empty unless logprobs=True
    token_logprobs_list: list[float] = field(default_factory=list)
    #: of a request with pooling one entry: {"embedding": float32 [hidden size]}
    tensors_from_model_inference: list[dict[str, Any]] = field(default_factory=list)
    #: prompt tokens that came from the prefix cache; on a GPU, and in host memory
    prefix_cache_len: int = 0
    prefix_len_gpu: int = 0
    prefix_len_cpu: int = 0
    #: which of the n samples of the prompt these tokens belong to
    sample_index: int = 0
    #: text that became decodable with these tokens, for requests started with text or messages
    text: str = ""
    #: with prompt_logprobs, once: for each of the prompt's tokens but the first, pairs of id and log probability, its
    #: own, then the likeliest
    prompt_logprobs_list: list[list[tuple[int, float]]] = field(default_factory=list)

    #: with the sample's last token: why it ended, as ResultQueue.FinishReason says it of the request
    finish_reason: str | None = None
    #: which of GenerateConfig.stop ended it, if one did
    stop_string: str | None = None

    def _get_text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _set_text(self, text: str) -> None:
        self._pieces = [text]

    def extend(self, other: GeneratedElements) -> None:
        """Append `other`, which follows this one and is of the same sample. Takes time for `other` alone, however much
        is here already: text is joined when it is read.
        """
        self.ids_from_generate.extend(other.ids_from_generate)
        self.log_probs_list.extend(other.log_probs_list)
        self.token_logprobs_list.extend(other.token_logprobs_list)
        self.tensors_from_model_inference.extend(other.tensors_from_model_inference)
        self.prompt_logprobs_list.extend(other.prompt_logprobs_list)
        self.prefix_cache_len = max(self.prefix_cache_len, other.prefix_cache_len)
        self.prefix_len_gpu = max(self.prefix_len_gpu, other.prefix_len_gpu)
        self.prefix_len_cpu = max(self.prefix_len_cpu, other.prefix_len_cpu)
        self._pieces += other._pieces
        if other.finish_reason is not None:
            self.finish_reason, self.stop_string = other.finish_reason, other.stop_string


# After @dataclass, which would take a property in the class for the field's default.
GeneratedElements.text = property(GeneratedElements._get_text, GeneratedElements._set_text)


@dataclass
class RequestStatInfo:
    """Times and lengths of one request. Times of day are Unix seconds, durations milliseconds; 0: not yet."""

    arrival_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    time_to_first_token: float = 0.0      #: ms from arrival
    time_in_queue: float = 0.0            #: ms from arrival to the first step that had it
    finish_time: float = 0.0              #: ms from arrival to the end
    context_token_length: int = 0         #: prompt tokens
    generated_token_length: int = 0
    context_cached_length: int = 0        #: prompt tokens that came from the prefix cache
    context_tps: float = 0.0              #: prompt tokens/s
    generate_tps: float = 0.0             #: generated tokens/s

    def update(self, values: dict[str, float]) -> None:
        """Take over the known keys of `values`; others are ignored, so that old clients read newer servers."""
        for f in fields(self):
            if f.name in values:
                setattr(self, f.name, int(values[f.name]) if isinstance(f.default, int) else float(values[f.name]))

    def dict(self) -> dict[str, float]:
        """All fields as a dict."""
        return asdict(self)


@dataclass
class AsEngineStat:
    """A model's load and counters, since it was started."""

    model_name: str = ""
    total_span: int = 0
    used_span: int = 0
    free_span: int = 0
    total_token: int = 0                 #: tokens the KV cache can hold
    free_token: int = 0
    pendding_request: int = 0            #: waiting requests (DashInfer's spelling)
    running_request: int = 0
    total_prefill_token: int = 0
    total_generated_token: int = 0
    generate_token_persec: float = 0.0   #: over the last seconds
    process_token_persec: float = 0.0    #: prompt and generated tokens
    token_usage_percentage: float = 0.0  #: 0…100
    prefix_cache_hit_token: int = 0
    prefix_cache_miss_token: int = 0
    prefix_cache_hit_rate: float = 0.0   #: 0…1
    prefix_cache_miss_rate: float = 0.0  #: 0…1
    preempted_request: int = 0           #: times a running request gave way
    total_host_span: int = 0             #: spans that the prefix cache's second tier can hold
    used_host_span: int = 0
    prefix_cache_host_token: int = 0     #: of prefix_cache_hit_token, those that came from the second tier
    saved_host_span: int = 0             #: spans that were copied to the second tier
    restored_host_span: int = 0          #: and back

    @property
    def pending_request(self) -> int:
        """Waiting requests."""
        return self.pendding_request

    def dict(self) -> dict[str, str]:
        """All fields, values as text (as DashInfer gives them)."""
        return {name: str(value) for name, value in asdict(self).items()}

    def ToString(self) -> str:
        """One line of 'field: value' pairs."""
        return ", ".join(f"{name}: {value}" for name, value in self.dict().items())

    @staticmethod
    def merged(stats: Iterable[AsEngineStat]) -> AsEngineStat:
        """The sum over the members of a pool, with rates computed anew."""
        stats = list(stats)
        total = AsEngineStat(model_name=stats[0].model_name)
        for f in fields(AsEngineStat):
            if f.name != "model_name":
                setattr(total, f.name, sum(getattr(s, f.name) for s in stats))
        used = total.total_token - total.free_token
        total.token_usage_percentage = 100.0 * used / total.total_token if total.total_token else 0.0
        seen = total.prefix_cache_hit_token + total.prefix_cache_miss_token
        total.prefix_cache_hit_rate = total.prefix_cache_hit_token / seen if seen else 0.0
        total.prefix_cache_miss_rate = total.prefix_cache_miss_token / seen if seen else 0.0
        return total


@dataclass
class ModelInfo:
    """An installed model: what get_model_info returns."""

    name: str = ""
    architecture: str = ""
    vocab_size: int = 0
    num_layers: int = 0
    eos_token_ids: list[int] = field(default_factory=list)
    max_length: int = 0                 #: engine_max_length: prompt and output together
    num_spans: int = 0
    span_size: int = 0
    max_step_tokens: int = 0
    max_batch: int = 0
    weight_bytes: int = 0               #: on rank 0
    cache_bytes: int = 0                #: on rank 0
    ranks: int = 1
    isa: str = ""
    weight_dtype: str = ""
    cache_dtype: str = ""
    model_hash: str = ""
    tokenizer_dir: str | None = None    #: in the process that has the model; clients of a server are not told
    dynamic_rope_original: int = 0      #: 0 unless the rotary scaling is dynamic
    long_rope_original: int = 0         #: histories beyond it have another rotary embedding (LongRoPE); 0: they have not
    #: of each cache group (layers that share spans), how many of the last positions it keeps; 0: all
    cache_windows: list[int] = field(default_factory=lambda: [0])
    weight_group_size: int = 0          #: of quantized weights along K; 0: per output channel, or not quantized
    host_spans: int = 0                 #: of the prefix cache's second tier
    host_cache_bytes: int = 0           #: of the second tier, on rank 0
    quantize_head: bool = True          #: whether the embedding and the head are in weight_dtype too
    embeddings: bool = False            #: whether requests may have pooling: its program hands out hidden states
    chat_format: str = ""               #: how its answers hold tool calls and reasoning, see allspark_server.chat
    #: keys of GenerateConfig that the checkpoint's generation_config.json recommends; requests have them only where a
    #: server applies them (the HTTP server does)
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    def dict(self) -> dict[str, Any]:
        """All fields as a dict."""
        return asdict(self)


class Detokenized(NamedTuple):
    """What detokenize returns."""

    text: str               #: of all ids, special tokens included
    tokens: list[bytes]     #: of each id; a token may be a part of a character


@dataclass
class ModelState:
    """One line of list_models: enough for a client to choose a member of a pool, and to resume on it."""

    name: str
    running: bool
    fingerprint: str      #: equal only where the same request gives the same bytes
    load: int = 0         #: waiting and running requests
    work: int = 0         #: tokens of prompts that these still have to have computed, about
    #: digests of the LoRA adapters that are loaded, by their names; where one is equal, so are the adapters
    adapters: dict[str, str] = field(default_factory=dict)


@dataclass
class MemberState:
    """A group of a pool, as its client sees it."""

    address: str
    connected: bool = False
    version: str = ""
    ranks: int = 0
    placement: list[str] = field(default_factory=list)      #: of each rank, where it runs
    models: list[ModelState] = field(default_factory=list)


@dataclass
class AsFileInfo:
    """Versions recorded in a serialized model, and this engine's."""

    create_version_graph: str = ""
    create_version_param: str = ""
    current_version_engine: str = ""


@dataclass
class TlsConfig:
    """PEM files of one end of a TLS connection.

    A server needs `cert` and `key`; its `ca` makes client certificates mandatory. A client's `ca` replaces the
    system's roots, its `cert` and `key` are shown to servers that ask; `server_name` is checked instead of the address.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None
