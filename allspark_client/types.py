"""Enums and result types of the public API. Plain data: nothing here talks to an engine."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum, IntEnum
from typing import Any, NamedTuple


class GenerateRequestStatus(IntEnum):
    """The state of a request. The last three are final."""

    Init = 0                 #: waiting to be scheduled
    ContextFinished = 1      #: the prompt has been computed
    Generating = 2
    GenerateFinished = 3     #: ended by end-of-sequence, a stop word or a length limit
    GenerateInterrupted = 4  #: stopped by stop_request, stop_model, release or a vanished client
    InternalError = 5        #: failed; ResultQueue.Get raises why

    @property
    def final(self) -> bool:
        """Whether the request has ended: no more tokens can arrive."""
        return self >= GenerateRequestStatus.GenerateFinished


class TargetDevice(Enum):
    """The kind of device that AsModelRuntimeConfigBuilder.compute_unit places a model on."""

    CUDA = "CUDA"
    CPU = "CPU"
    CPU_NUMA = "CPU_NUMA"


class RoPEScaleMethod(Enum):
    """How HuggingFaceModel.set_rope_scale_method scales the rotary embedding for longer contexts."""

    NO_SCALE = 0
    YaRN = 3
    NTK = 4     #: dynamic: depends on the length of the context


class AsCacheMode(IntEnum):
    """How the KV cache stores keys and values: as computed, or quantized to 8 or 4 bits."""

    AsCacheDefault = 0
    AsCacheQuantI8 = 1
    AsCacheQuantU4 = 2


class AsMHAPrefill(IntEnum):
    """DashInfer's choice of prefill kernel; this project has one, the default."""

    AsPrefillDefault = 0
    AsPrefillFlashV2 = 10
    AsPrefillXformer = 20


class AsEvictionStrategy(IntEnum):
    """Which running request is preempted when the cache is full."""

    MaxLength = 0
    Random = 1


class AsSchedulingStrategy(IntEnum):
    """Whether prompts are computed before running requests or share the step with them."""

    ContextPriority = 0
    Balance = 1


class VocabType(IntEnum):
    """Tokenizer family of GenerateConfig.vocab, which structured output uses."""

    VOCAB_TYPE_WPM = 0
    VOCAB_TYPE_SPM = 1
    VOCAB_TYPE_UGM = 2
    VOCAB_TYPE_BPE = 3


@dataclass
class GeneratedElements:
    """New tokens of one sample of a request, in the order in which they were generated.

    Each of log_probs_list and token_logprobs_list is empty or has one entry per token of ids_from_generate.
    """

    ids_from_generate: list[int] = field(default_factory=list)
    #: for each token, the top_logprobs most likely (id, logprob) pairs, most likely first; empty unless logprobs=True
    log_probs_list: list[list[tuple[int, float]]] = field(default_factory=list)
    #: logprob of each token; empty unless logprobs=True
    token_logprobs_list: list[float] = field(default_factory=list)
    #: for a request with pooling, one entry: {"embedding": a float32 array of shape [hidden size]}
    tensors_from_model_inference: list[dict[str, Any]] = field(default_factory=list)
    #: prompt tokens that came from the prefix cache: in all, from a GPU's memory, and from host memory
    prefix_cache_len: int = 0
    prefix_len_gpu: int = 0
    prefix_len_cpu: int = 0
    #: index of the sample that these tokens belong to, from 0 to n - 1
    sample_index: int = 0
    #: text that became decodable with these tokens, for requests started with text or messages
    text: str = ""
    #: with prompt_logprobs, in one of the elements: for each token of the prompt but the first, pairs of id and log
    #: probability: its own, then the most likely ones
    prompt_logprobs_list: list[list[tuple[int, float]]] = field(default_factory=list)

    #: with the sample's last token: why the sample ended, in the words of ResultQueue.FinishReason
    finish_reason: str | None = None
    #: the string of GenerateConfig.stop that ended the sample, if one did
    stop_string: str | None = None

    @classmethod
    def of_token(cls, sample: int, token: int, text: str, logprob: float | None, top: list[tuple[int, float]],
                 cached: tuple[int, int, int]) -> GeneratedElements:
        """One token. `logprob`, `top`: None and [] unless wanted; `cached`: the fields about the prefix cache.

        As the constructor with these fields, in half its time: most elements are made here.
        """
        self = cls.__new__(cls)
        self.ids_from_generate = [token]
        self.log_probs_list = [] if logprob is None else [top]
        self.token_logprobs_list = [] if logprob is None else [logprob]
        self.tensors_from_model_inference = []
        self.prefix_cache_len, self.prefix_len_gpu, self.prefix_len_cpu = cached
        self.sample_index = sample
        self._texts = [text]
        self.prompt_logprobs_list = []
        self.finish_reason = self.stop_string = None
        return self

    def _set_text(self, text: str) -> None:
        self._texts: list[str] = [text]

    def _get_text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0]

    def extend(self, other: GeneratedElements) -> None:
        """Append `other`, the next elements of the same sample.

        The time depends on the size of `other` alone, since texts are joined when they are read.
        """
        self.ids_from_generate.extend(other.ids_from_generate)
        self.log_probs_list.extend(other.log_probs_list)
        self.token_logprobs_list.extend(other.token_logprobs_list)
        self.tensors_from_model_inference.extend(other.tensors_from_model_inference)
        self.prompt_logprobs_list.extend(other.prompt_logprobs_list)
        self.prefix_cache_len = max(self.prefix_cache_len, other.prefix_cache_len)
        self.prefix_len_gpu = max(self.prefix_len_gpu, other.prefix_len_gpu)
        self.prefix_len_cpu = max(self.prefix_len_cpu, other.prefix_len_cpu)
        self._texts += other._texts
        if other.finish_reason is not None:
            self.finish_reason, self.stop_string = other.finish_reason, other.stop_string


# After @dataclass, which would take a property in the class for the field's default. In this form for type checkers, to
# which the field stays a str.
type.__setattr__(GeneratedElements, "text", property(GeneratedElements._get_text, GeneratedElements._set_text))


@dataclass
class RequestStatInfo:
    """Times and lengths of one request. Times of day are Unix times in s, durations are in ms; 0: not known yet."""

    arrival_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    time_to_first_token: float = 0.0      #: ms from arrival
    time_in_queue: float = 0.0            #: ms from arrival to the first step that computed it
    finish_time: float = 0.0              #: ms from arrival to the end
    context_token_length: int = 0         #: prompt tokens
    generated_token_length: int = 0
    context_cached_length: int = 0        #: prompt tokens that came from the prefix cache
    context_tps: float = 0.0              #: prompt tokens/s
    generate_tps: float = 0.0             #: generated tokens/s
    accepted_prediction_tokens: int = 0   #: tokens of GenerateConfig.prediction that were tried and became output
    rejected_prediction_tokens: int = 0   #: those that were tried in vain

    def update(self, values: dict[str, float]) -> None:
        """Set the fields that `values` names. Other keys are ignored: old clients can read newer servers."""
        for f in fields(self):
            if f.name in values:
                setattr(self, f.name, int(values[f.name]) if isinstance(f.default, int) else float(values[f.name]))

    def dict(self) -> dict[str, float]:
        """All fields as a dict."""
        return asdict(self)


@dataclass
class AsEngineStat:
    """A model's load, and its counters since it was started. Spans are the cache's units of cache_span_size tokens."""

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
    preempted_request: int = 0           #: how often a running request was preempted
    total_host_span: int = 0             #: spans that the host cache, the prefix cache's second tier, can hold
    used_host_span: int = 0
    prefix_cache_host_token: int = 0     #: of prefix_cache_hit_token, those from the host cache
    saved_host_span: int = 0             #: spans copied to the host cache
    restored_host_span: int = 0          #: spans copied back from it

    @property
    def pending_request(self) -> int:
        """Waiting requests."""
        return self.pendding_request

    def dict(self) -> dict[str, str]:
        """All fields, with their values as text, as in DashInfer."""
        return {name: str(value) for name, value in asdict(self).items()}

    def ToString(self) -> str:
        """All fields as one line of 'field: value' pairs."""
        return ", ".join(f"{name}: {value}" for name, value in self.dict().items())

    @staticmethod
    def merged(stats: Iterable[AsEngineStat]) -> AsEngineStat:
        """The sum of the statistics of a pool's members, with rates computed from the sums."""
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
    """An installed model, as get_model_info returns it."""

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
    weight_bytes: int = 0               #: on rank 0, with those that make drafts
    cache_bytes: int = 0                #: on rank 0
    ranks: int = 1
    isa: str = ""
    weight_dtype: str = ""
    cache_dtype: str = ""
    model_hash: str = ""
    tokenizer_dir: str | None = None    #: a path in the engine's process; None in clients of a server
    dynamic_rope_original: int = 0      #: 0 unless the rotary scaling is dynamic
    long_rope_original: int = 0         #: contexts longer than this use LongRoPE's other factors; 0: no LongRoPE
    #: for each cache group (layers that share spans), how many of the last positions it keeps; 0: all
    cache_windows: list[int] = field(default_factory=lambda: [0])
    state_spans: int = 0                #: spans that hold a sequence's recurrent state; 0: the model has none
    weight_group_size: int = 0          #: length along K of quantization groups; 0: per channel, or none
    host_spans: int = 0                 #: spans of the host cache
    host_cache_bytes: int = 0           #: of the host cache, on rank 0
    quantize_head: bool = True          #: whether embedding and head are stored in weight_dtype, too
    embeddings: bool = False            #: whether requests may set pooling
    only_pools: bool = False            #: an encoder or a classifier, which makes no tokens
    whole_texts: bool = False           #: an encoder: it computes a text in one step, and caches no prefixes
    pooling: str = ""                   #: what pooling="auto" means: "cls", "mean" or "last"
    embedding_size: int = 0             #: values of an embedding; 0 for classifiers
    #: texts that precede a text that is embedded, by the names that the checkpoint gives them
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""            #: the name of the prompt of texts for which none is named; empty: none
    labels: list[str] = field(default_factory=list)     #: of a classifier; a reranker has one
    #: what makes scores of a classifier's logits: "sigmoid", "softmax" or "identity"; of a reranker with two logits,
    #: those of a yes and a no, "odds", the probability of the yes among both
    score_function: str = ""
    max_characters: int = 0             #: longer texts are certainly too long for max_length; 0: not known
    chat_format: str = ""               #: how answers spell tool calls and reasoning, see allspark_server.chat
    #: whether the chat template has tools of a form that is not known, so that calls are perhaps not recognized
    chat_format_guessed: bool = False
    #: layers of the draft head: draft i of a step comes from layer i, further ones from the last; 0: there is no head
    draft_layers: int = 0
    reasoning: bool = False             #: whether requests may limit reasoning (thinking_token_budget)
    sees_images: bool = False           #: whether requests may have images
    no_images_reason: str = ""          #: why they may not, where another form of the model may see images
    #: values of GenerateConfig that the checkpoint's generation_config.json recommends. The HTTP server applies them;
    #: engines do not
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    def dict(self) -> dict[str, Any]:
        """All fields as a dict."""
        return asdict(self)


class Detokenized(NamedTuple):
    """The result of detokenize."""

    text: str               #: the text of all ids, special tokens included
    tokens: list[bytes]     #: the bytes of each id; a token may be a part of a character


@dataclass
class ModelState:
    """The state of an installed model, as list_models returns it."""

    name: str
    running: bool
    fingerprint: str      #: equal fingerprints: the same request gives the same bytes
    load: int = 0         #: waiting and running requests
    work: int = 0         #: prompt tokens of these requests that are not computed yet, about
    #: names of the loaded LoRA adapters, and a digest of each: equal digests mean equal adapters
    adapters: dict[str, str] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)        #: further names for HTTP clients
    on_demand: bool = False     #: it is not loaded now, and load_model or a request loads it
    isa: str = ""               #: instruction set, or GPU, that computes it
    #: loaded or not: it was installed with on_demand, so requests load it, and unload_model unloads it
    installed_on_demand: bool = False
    #: equal ones: an image is prepared and bounded alike; "": it takes none
    image_fingerprint: str = ""


@dataclass
class MemberState:
    """A server group of a pool, as its client sees it."""

    address: str
    connected: bool = False
    version: str = ""
    ranks: int = 0
    placement: list[str] = field(default_factory=list)      #: where each rank runs
    models: list[ModelState] = field(default_factory=list)
    draining: bool = False      #: it takes no new requests


@dataclass
class AsFileInfo:
    """The versions recorded in a serialized model's two files, and the engine's version."""

    create_version_graph: str = ""
    create_version_param: str = ""
    current_version_engine: str = ""


@dataclass
class TlsConfig:
    """Paths of the PEM files for one end of a TLS connection.

    A server needs `cert` and `key`; with `ca` it requires client certificates. A client needs none of them.
    """

    ca: str | None = None           #: trusted certificate authorities; a client's default: the system's
    cert: str | None = None         #: this end's certificate; a client shows it to servers that ask for one
    key: str | None = None          #: the private key of `cert`
    server_name: str | None = None  #: in a client: the name that the server's certificate must have, if not the address
