"""AbstractEngine: the API that Engine (one process) and ClientEngine (gRPC to a server group) share."""
from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from . import texts as text_outputs
from .chat import ChatOptions, check_messages
from .config import ASGenerationConfigBuilder, AsModelConfig, GenerateConfig
from .errors import AsStatus, nearest_name
from .fields import valid_unicode
from .generation import Generation
from .images import take_images, take_list
from .queue import ResultQueue
from .request import RequestSpec
from .tokens import as_token_ids
from .types import AsEngineStat, AsFileInfo, Detokenized, GenerateRequestStatus, ModelInfo, ModelState

__all__ = ["AbstractEngine", "as_token_ids"]

_INPUTS = ("input_ids", "text", "messages")
_CHAT = tuple(f.name for f in fields(ChatOptions))


class AbstractEngine(ABC):
    """The API that Engine and ClientEngine share: loads models and generates with them.

    Methods return AsStatus.ALLSPARK_SUCCESS unless they say otherwise. They raise ValueError or TypeError for a wrong
    argument, with its name, its value and what is allowed, and AllSparkError for a refused or failed call: `.status`
    is one of AsStatus, and the text starts with its name. Any thread may call any method. An engine is a context
    manager that closes itself.
    """

    # --- models --------------------------------------------------------------------------------------------------

    @abstractmethod
    def install_model(self, config: AsModelConfig) -> AsStatus:
        """Load a model. It takes requests after start_model.

        Args:
            config: the checkpoint and how to run it; config.model_name must be a name that no installed model has.

        Raises:
            ValueError: fields of the config contradict each other or do not fit the checkpoint or the machine.
            AllSparkError: ALLSPARK_IO_ERROR, ALLSPARK_MEMORY_ERROR, or ALLSPARK_PARAM_ERROR for a name in use.
        """

    def build_model_from_config_struct(self, config: AsModelConfig) -> AsStatus:
        """DashInfer's older name of install_model."""
        return self.install_model(config)

    @abstractmethod
    def start_model(self, model_name: str) -> AsStatus:
        """Let an installed model take requests. A model that has failed is loaded again; AllSparkError if this process
        cannot, because it can no longer use its GPUs.
        """

    @abstractmethod
    def stop_model(self, model_name: str) -> AsStatus:
        """End the model's live requests as GenerateInterrupted, and take no new ones. It stays loaded."""

    @abstractmethod
    def release_model(self, model_name: str) -> AsStatus:
        """Free an installed model. A running one is stopped first."""

    @abstractmethod
    def load_model(self, model_name: str, on_progress: Callable[[float], None] | None = None) -> AsStatus:
        """Load a model that is installed with on_demand, and wait until it is loaded.

        Requests that name the model do so themselves. To make room, models with on_demand that were not used for the
        longest time are unloaded. Does nothing if the model is loaded.

        Args:
            model_name: an installed and started model.
            on_progress: called now and then with the part that is loaded, 0…1.

        Raises:
            AllSparkError: ALLSPARK_MEMORY_ERROR if there is no room, or what install_model would raise.
        """

    @abstractmethod
    def unload_model(self, model_name: str) -> AsStatus:
        """Unload a model that is installed with on_demand; the next request that names it loads it again.

        Raises AllSparkError: ALLSPARK_INVALID_CALL_ERROR if it has live requests, or is not a model on demand.
        """

    @abstractmethod
    def list_models(self) -> list[ModelState]:
        """The state, fingerprint and load of each installed model."""

    # --- requests ------------------------------------------------------------------------------------------------

    def start_request(
        self, model_name: str, inputs: dict[str, Any],
        generate_config: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None, *,
        want_text: bool | None = None,
    ) -> tuple[AsStatus, int, ResultQueue]:
        """Start a request. The call returns once the engine has accepted it; tokens then arrive in the queue.

        A ClientEngine waits for its server in this call: in an event loop, use AsyncClientEngine.

        Args:
            model_name: a running model.
            inputs: the prompt, one of

                - {"input_ids": X}: token ids of shape [n] or [1, n] as a DLPack capsule, an object with __dlpack__, a
                  NumPy array of integers or a list of ints,
                - {"text": str}, which the engine tokenizes; with "text_pair", a second text that rerankers compare,
                - {"messages": [{"role": …, "content": …}, …]}: a chat in OpenAI's form, with content parts and tool
                  calls, which the checkpoint's chat template renders. The dict may also have the fields of ChatOptions:
                  "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "chat_template" and
                  "chat_format". The package allspark_server.chat takes tool calls and reasoning out of an answer.

                For models that see (ModelInfo.sees_images), parts of messages may be images: {"type": "image_url",
                "image_url": {"url": X, "detail": …}} or {"type": "image", "image": X}, where X is a data URL, or in the
                second form also the bytes of an encoded file (PNG, JPEG, WebP, GIF), a pathlib.Path, which this process
                reads, a PIL image, or a uint8 array of shape [height, width, 3]. "min_pixels" and "max_pixels" of a
                part bound the size that the model sees. "images": [X, …] beside the prompt has the images of parts
                {"type": "image"} alone, or of the placeholders in text and ids, in order.
            generate_config: how to generate; None: GenerateConfig's defaults.
            want_text: whether elements carry text besides token ids; None: only if the prompt is not ids.

        Returns:
            (ALLSPARK_SUCCESS, handle, queue): the handle names the request in other methods, the queue has its output.

        Raises:
            ValueError, TypeError: an argument is wrong.
            AllSparkError: ALLSPARK_EXCEED_LIMIT_ERROR if the request exceeds a limit of the model, or if a queue is
                full (then it is `.retryable`), ALLSPARK_PARAM_ERROR for an unknown model, ALLSPARK_LORA_NOT_FOUND,
                ALLSPARK_REQUEST_DENIED, ALLSPARK_INVALID_CALL_ERROR.
        """
        return self._start(request_spec(model_name, inputs, generate_config, want_text, self._token_ids))

    def generate(
        self, model_name: str, inputs: dict[str, Any],
        generate_config: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None, *,
        want_text: bool | None = None,
    ) -> Generation:
        """A request as a context manager: entering the block starts it, leaving the block releases it.

        Arguments and errors are those of start_request.

            with engine.generate("m", {"text": "Once"}, {"max_new_tokens": 32}) as generation:
                for elements in generation:
                    print(elements.text, end="")
        """
        return Generation(self, request_spec(model_name, inputs, generate_config, want_text, self._token_ids))

    def start_request_ids(
        self, model_name: str, model: Any, input_ids: Any,
        generate_config_builder: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None,
    ) -> tuple[AsStatus, int, ResultQueue]:
        """As start_request with {"input_ids": input_ids}. `model`, a loader in DashInfer's signature, is not used."""
        return self.start_request(model_name, {"input_ids": input_ids}, generate_config_builder)

    def start_request_text(
        self, model_name: str, model: Any, input_str: str,
        generate_config_builder: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None,
    ) -> tuple[AsStatus, int, ResultQueue]:
        """As start_request with text. `model`: a loader whose get_tokenizer() tokenizes it; None: the engine does."""
        inputs = {"text": input_str} if model is None else {"input_ids": ids_of_text(model, input_str)}
        return self.start_request(model_name, inputs, generate_config_builder)

    #: as_token_ids, or the same in less time
    _token_ids: Callable[[Any], list[int]] = staticmethod(as_token_ids)

    @abstractmethod
    def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        """Start a request whose arguments have been checked, though not against the model."""

    @abstractmethod
    def stop_request(self, model_name: str, request_handle: int) -> AsStatus:
        """Cancel a request: its status becomes GenerateInterrupted, and its tokens so far can still be read.

        Has no effect on a request that has ended. Raises AllSparkError: ALLSPARK_ILLEGAL_REQUEST_ID.
        """

    @abstractmethod
    def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        """Free a request, cancelling it if it is live. Its handle becomes invalid; its queue can still be read.

        Handles of requests that ended thousands of requests ago become invalid by themselves.
        """

    @abstractmethod
    def sync_request(self, model_name: str, request_handle: int | None = None) -> AsStatus:
        """Wait until a request, or with None every request of the model, has ended."""

    def get_no_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """The token ids that have arrived since the last call; an empty list if there are none."""
        elements = _queue(result_queue).GetNoWait()
        return elements.ids_from_generate if elements is not None else []

    def get_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """Wait for new token ids and return them; an empty list once the request has ended."""
        elements = _queue(result_queue).Get()
        return elements.ids_from_generate if elements is not None else []

    def get_request_status(self, model_name: str, result_queue: ResultQueue) -> GenerateRequestStatus:
        """As result_queue.GenerateStatus()."""
        return _queue(result_queue).GenerateStatus()

    # --- texts -----------------------------------------------------------------------------------------------------

    def embed(self, model_name: str, texts: str | Sequence[Any], *, prompt_name: str | None = None,
              prompt: str | None = None, pooling: str = "auto", normalize: bool = True, dimensions: int | None = None,
              truncate: bool = False) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Embeddings of texts: float32 [texts, values].

        Args:
            model_name: a running model, an embedder or one that generates.
            texts: a text, or a list of texts and lists of token ids.
            prompt_name: the checkpoint's prompt to put before each text (ModelInfo.prompts), such as "query"; None: its
                default one, if it has one; "": none.
            prompt: this text in place of a named prompt.
            pooling: as GenerateConfig.pooling; "auto": as the checkpoint says.
            normalize: scale each embedding to length 1.
            dimensions: keep so many values of each, for models that were trained for it (Matryoshka).
            truncate: cut texts that are too long, at their ends; otherwise they are refused.

        Raises:
            ValueError, TypeError: an argument is wrong.
            AllSparkError: as start_request; ALLSPARK_INVALID_CALL_ERROR for a classifier.
        """
        return text_outputs.embed(self, model_name, texts, prompt_name=prompt_name, prompt=prompt, pooling=pooling,
                                  normalize=normalize, dimensions=dimensions, truncate=truncate)

    def rerank(self, model_name: str, query: str, documents: Sequence[str], *,
               truncate: bool = True) -> np.ndarray[Any, np.dtype[np.float32]]:
        """How well each document answers a query: float32 [documents], in their order; more is better.

        A reranker (a classifier with one label) compares the two texts. Of an embedder, it is the cosine of the
        embeddings, with the checkpoint's prompts of queries and documents. truncate: cut documents that are too long.
        Raises as embed; AllSparkError for a classifier with several labels.
        """
        return text_outputs.rerank(self, model_name, query, documents, truncate=truncate)

    def classify(self, model_name: str, texts: str | Sequence[Any], *,
                 truncate: bool = False) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Scores of a classifier's labels (ModelInfo.labels): float32 [texts, labels].

        texts: a text, or a list of texts, pairs of texts (tuples) and lists of token ids. Raises as embed;
        AllSparkError for a model that is no classifier.
        """
        return text_outputs.classify(self, model_name, texts, truncate=truncate)

    # --- information ---------------------------------------------------------------------------------------------

    @abstractmethod
    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """The model's load, and its counters since it was started."""

    @abstractmethod
    def get_model_info(self, model_name: str) -> ModelInfo:
        """The model's architecture, and how it was loaded."""

    @abstractmethod
    def _tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        """The ids of a prompt whose arguments have been checked."""

    def tokenize(self, model_name: str, inputs: dict[str, Any], bare: bool = False) -> list[int]:
        """The token ids of a prompt.

        Args:
            model_name: an installed model.
            inputs: a prompt in the forms of start_request.
            bare: leave out tokens that the tokenizer adds to text, such as a begin-of-sequence token.
        """
        return self._tokenize(_prompt(check_model_name(model_name), inputs), bool(bare))

    @abstractmethod
    def detokenize(self, model_name: str, ids: list[int]) -> Detokenized:
        """The text of token ids, and the bytes of each."""

    @abstractmethod
    def get_file_information(self, as_graph_path: str | os.PathLike[str],
                             as_param_path: str | os.PathLike[str]) -> AsFileInfo:
        """The versions recorded in a serialized model's two files. The paths are on the engine's machine."""

    @abstractmethod
    def get_op_profiling_info(self, model_name: str) -> str:
        """A table as text with a line for each op.

        Its columns: op, count, min, max, mean and sum of the time in ms, % of the total, GB moved and Gop computed,
        their rates, the fraction of the machine's roofline that the op reaches, and the matrix that it multiplies by.
        The last line has the measured rooflines.

        The engine profiles the first minute after the model's first step, and another minute from the first step after
        each call. The first call in a process measures the machine, which takes a second or more, in slices of ten
        milliseconds between steps.
        """

    @abstractmethod
    def get_rank_id(self) -> int:
        """The rank of the process that answers: 0."""

    @abstractmethod
    def get_rank_nums(self) -> int:
        """The number of ranks that compute together; 1 for an Engine."""

    @abstractmethod
    def is_allspark_work_as_service(self) -> bool:
        """Whether a server group computes the requests: True for a ClientEngine, False for an Engine."""

    @abstractmethod
    def get_version_full(self) -> str:
        """The version of the engine that computes."""

    # --- adapters ------------------------------------------------------------------------------------------------

    @abstractmethod
    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Load a LoRA adapter while the model serves. Requests name it in GenerateConfig.lora_name.

        Args:
            model_name: an installed model.
            lora_name: an adapter's directory as PEFT writes it: its name, beside the checkpoint's files; a path on the
                server's machine, whose last part becomes the adapter's name; or NAME=PATH.

        Raises:
            AllSparkError: ALLSPARK_LORA_NOT_FOUND, ALLSPARK_LORA_ALREADY_LOADED, ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR
                (lora_max_num), ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR (lora_max_rank), or ALLSPARK_PARAM_ERROR for an
                adapter that does not fit the model, with the reason.
        """

    @abstractmethod
    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Free a LoRA adapter.

        Raises AllSparkError: ALLSPARK_LORA_NOT_FOUND, or ALLSPARK_LORA_IN_USE while requests use it.
        """

    # --- device memory -------------------------------------------------------------------------------------------

    @abstractmethod
    def unload_device_mem(self, model_name: str) -> AsStatus:
        """Free a stopped model's memory on its GPUs. Its weights are kept in pinned memory of the host.

        The part of the prefix cache in GPU memory is lost. Has no effect if the memory is free already. Raises
        AllSparkError for a running model, and for one that is not on GPUs.
        """

    @abstractmethod
    def load_device_mem(self, model_name: str) -> AsStatus:
        """Undo unload_device_mem: the model can be started again. Raises AllSparkError if too little memory is free."""

    @abstractmethod
    def reset_prefix_cache(self, model_name: str) -> AsStatus:
        """Forget the cached prefixes that no request uses, in memory and in the host cache.

        Outputs do not depend on it: benchmarks call it between runs.
        """

    # --- end -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Stop and free an Engine's models, or close a client's connections. Idempotent."""

    def __enter__(self) -> AbstractEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def request_spec(
    model_name: Any, inputs: Any, generate_config: Any, want_text: bool | None = None,
    token_ids: Callable[[Any], list[int]] = as_token_ids,
) -> RequestSpec:
    """The arguments of start_request, checked as far as possible without the model; raises ValueError or TypeError.
    `token_ids`: what checks ids.
    """
    config = GenerateConfig.parse(generate_config)
    spec = _prompt(check_model_name(model_name), inputs, token_ids)
    spec.config = config
    if want_text is not None and not isinstance(want_text, bool):
        raise TypeError(f"want_text must be a bool or None, not {type(want_text).__name__}")
    if want_text is not None:
        spec.want_text = want_text
    return spec


def ids_of_text(model: Any, text: Any) -> list[int]:
    """The ids of a text by a loader's tokenizer."""
    encoded = model.get_tokenizer().encode(_text(text))
    return list(getattr(encoded, "ids", encoded))


def check_config(config: Any) -> AsModelConfig:
    """The argument of install_model, checked as far as possible without the model."""
    if not isinstance(config, AsModelConfig):
        raise TypeError(f"config must be an AsModelConfig (a builder's build() gives one), not {type(config).__name__}")
    return config.validate()


def check_handle(handle: Any) -> int:
    """`handle`, if it is an int; whether such a request exists, the engine checks."""
    if isinstance(handle, bool) or not isinstance(handle, int):
        raise TypeError(f"request_handle must be the int that start_request returned, not {type(handle).__name__}")
    return handle


def check_model_name(name: Any) -> str:
    """`name`, if it is a str; whether such a model is installed, the engine checks."""
    if not isinstance(name, str):
        raise TypeError(f"model_name must be a str, not {type(name).__name__}")
    return name


def _prompt(
    model_name: str, inputs: Any, token_ids: Callable[[Any], list[int]] = as_token_ids
) -> RequestSpec:
    """A request with this prompt and the default config."""
    spec = RequestSpec(model=model_name)
    if not isinstance(inputs, dict):
        raise TypeError(f"inputs must be a dict such as {{'input_ids': ids}}, not {type(inputs).__name__}")
    more = _CHAT if "messages" in inputs else ("text_pair",) if "text" in inputs else ()
    known = (*_INPUTS, "images", *more)
    for key in inputs:
        if key not in known:
            raise ValueError(f"inputs has no key {key!r}; allowed: {', '.join(known)}{nearest_name(key, known)}")
    prompts = [key for key in inputs if key in _INPUTS]
    if len(prompts) != 1:
        raise ValueError(f"inputs must have exactly one of {', '.join(_INPUTS)}; it has {', '.join(prompts) or 'none'}")
    if "input_ids" in inputs:
        spec.input_ids = token_ids(inputs["input_ids"])
    elif "text" in inputs:
        spec.text, spec.want_text = _text(inputs["text"]), True
        if (pair := inputs.get("text_pair")) is not None:
            spec.text_pair = _text(pair, "text_pair") if pair != "" else ""
    else:
        messages, images = take_images(inputs["messages"], inputs.get("images"))
        spec.messages, spec.want_text = check_messages(messages), True
        options = {key: inputs[key] for key in _CHAT if inputs.get(key) is not None}
        if options:
            spec.chat = ChatOptions(**options).check()
    if spec.messages is None:
        images = take_list(inputs.get("images"))
    spec.set_images(images)
    return spec


def _queue(queue: Any) -> ResultQueue:
    if not isinstance(queue, ResultQueue):
        raise TypeError(f"result_queue must be the ResultQueue that start_request returned, not {type(queue).__name__}")
    return queue


def _text(text: Any, name: str = "text") -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, not {type(text).__name__}")
    if not text:
        raise ValueError(f"{name} is empty; a prompt needs at least one token")
    return valid_unicode(name, text)
