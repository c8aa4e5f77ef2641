"""The API that Engine (one process) and ClientEngine (gRPC to a server group) share."""
from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

from .chat import ChatOptions, check_messages
from .config import ASGenerationConfigBuilder, AsModelConfig, GenerateConfig
from .errors import AsStatus, nearest_name
from .fields import valid_unicode
from .generation import Generation
from .queue import ResultQueue
from .request import RequestSpec
from .tokens import as_token_ids
from .types import AsEngineStat, AsFileInfo, Detokenized, GenerateRequestStatus, ModelInfo, ModelState

__all__ = ["AbstractEngine", "as_token_ids"]

_INPUTS = ("input_ids", "text", "messages")
_CHAT = tuple(f.name for f in fields(ChatOptions))


class AbstractEngine(ABC):
    """Loads models and generates with them.

    Methods return AsStatus.ALLSPARK_SUCCESS unless said otherwise. Bad arguments raise ValueError or TypeError naming
    the argument, the value and what is allowed; a refused or failed call raises AllSparkError, whose text starts with
    its status' name. All methods may be called from any thread. An engine is a context manager that closes itself.
    """

    # --- models --------------------------------------------------------------------------------------------------

    @abstractmethod
    def install_model(self, config: AsModelConfig) -> AsStatus:
        """Load the model that `config` describes, under config.model_name, which must be new to the engine."""

    def build_model_from_config_struct(self, config: AsModelConfig) -> AsStatus:
        """DashInfer's older name of install_model."""
        return self.install_model(config)

    @abstractmethod
    def start_model(self, model_name: str) -> AsStatus:
        """Let an installed model take requests; one that has failed is loaded again."""

    @abstractmethod
    def stop_model(self, model_name: str) -> AsStatus:
        """Finish the model's live requests as GenerateInterrupted, and take no more."""

    @abstractmethod
    def release_model(self, model_name: str) -> AsStatus:
        """Free an installed model; a running one is stopped first."""

    @abstractmethod
    def list_models(self) -> list[ModelState]:
        """Name, state, fingerprint and load of each installed model."""

    # --- requests ------------------------------------------------------------------------------------------------

    def start_request(
        self, model_name: str, inputs: dict[str, Any],
        generate_config: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None, *,
        want_text: bool | None = None,
    ) -> tuple[AsStatus, int, ResultQueue]:
        """Start a request; returns with (status, handle, queue) once it is taken, tokens arrive in the queue.

        A client waits for its server's word meanwhile: in an event loop, use AsyncClientEngine.

        inputs: {"input_ids": X}, X a DLPack capsule, anything with __dlpack__, a NumPy array or a list of ints, of
        shape [n] or [1, n]; or {"text": str}; or {"messages": [{"role": …, "content": …}, …]}. With the latter two the
        engine tokenizes. `want_text`: whether elements carry text as well; None: unless the prompt is ids. Messages are
        OpenAI's, with content parts and tool calls; beside them may be "tools", "tool_choice", "parallel_tool_calls",
        "chat_template_kwargs" and "chat_format" (ChatOptions). What the answer's text holds, allspark_server.chat takes
        apart.
        """
        return self._start(request_spec(model_name, inputs, generate_config, want_text))

    def generate(
        self, model_name: str, inputs: dict[str, Any],
        generate_config: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None, *,
        want_text: bool | None = None,
    ) -> Generation:
        """A request as a context manager: started when it is entered, released when it is left, however that is.
        Arguments are those of start_request.

            with engine.generate("m", {"text": "Once"}, {"max_new_tokens": 32}) as generation:
                for elements in generation:
                    print(elements.text, end="")
        """
        return Generation(self, request_spec(model_name, inputs, generate_config, want_text))

    def start_request_ids(
        self, model_name: str, model: Any, input_ids: Any,
        generate_config_builder: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None,
    ) -> tuple[AsStatus, int, ResultQueue]:
        """As start_request with input_ids. `model` is the loader of DashInfer's signature; it may be None."""
        return self.start_request(model_name, {"input_ids": input_ids}, generate_config_builder)

    def start_request_text(
        self, model_name: str, model: Any, input_str: str,
        generate_config_builder: dict[str, Any] | GenerateConfig | ASGenerationConfigBuilder | None = None,
    ) -> tuple[AsStatus, int, ResultQueue]:
        """Start a request with text, tokenized by the loader `model` (get_tokenizer()), or by the engine if None."""
        inputs = {"text": input_str} if model is None else {"input_ids": ids_of_text(model, input_str)}
        return self.start_request(model_name, inputs, generate_config_builder)

    @abstractmethod
    def _start(self, spec: RequestSpec) -> tuple[AsStatus, int, ResultQueue]:
        """Start a request whose arguments have been checked (but not against the model)."""

    @abstractmethod
    def stop_request(self, model_name: str, request_handle: int) -> AsStatus:
        """Cancel: the status becomes GenerateInterrupted; what was generated stays readable. Harmless after the end."""

    @abstractmethod
    def release_request(self, model_name: str, request_handle: int) -> AsStatus:
        """Free the request, cancelling it if it is live. The handle becomes invalid; the queue stays readable.

        The handles of requests that ended long ago, thousands before this one, become invalid by themselves.
        """

    @abstractmethod
    def sync_request(self, model_name: str, request_handle: int | None = None) -> AsStatus:
        """Block until that request, or with None every request of the model, has ended."""

    def get_no_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """The token ids that have arrived since the last call; an empty list if none have."""
        elements = _queue(result_queue).GetNoWait()
        return elements.ids_from_generate if elements is not None else []

    def get_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """New token ids, waiting for the first; an empty list once the request has ended."""
        elements = _queue(result_queue).Get()
        return elements.ids_from_generate if elements is not None else []

    def get_request_status(self, model_name: str, result_queue: ResultQueue) -> GenerateRequestStatus:
        """As result_queue.GenerateStatus()."""
        return _queue(result_queue).GenerateStatus()

    # --- information ---------------------------------------------------------------------------------------------

    @abstractmethod
    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """The model's load and counters."""

    @abstractmethod
    def get_model_info(self, model_name: str) -> ModelInfo:
        """What the model is, and how it was loaded."""

    @abstractmethod
    def _tokenize(self, spec: RequestSpec, bare: bool) -> list[int]:
        """The ids of a prompt whose arguments have been checked."""

    def tokenize(self, model_name: str, inputs: dict[str, Any], bare: bool = False) -> list[int]:
        """The ids that the prompt `inputs` (as start_request takes them) has. `bare`: text without what the tokenizer
        puts around it, say a begin-of-sequence token.
        """
        return self._tokenize(_prompt(_model_name(model_name), inputs), bool(bare))

    @abstractmethod
    def detokenize(self, model_name: str, ids: list[int]) -> Detokenized:
        """The text of ids, and the bytes of each."""

    @abstractmethod
    def get_file_information(self, as_graph_path: str | os.PathLike, as_param_path: str | os.PathLike) -> AsFileInfo:
        """Versions recorded in a serialized model's two files (paths on the engine's machine)."""

    @abstractmethod
    def get_op_profiling_info(self, model_name: str) -> str:
        """A table as text: op, count, min, max, mean, sum (milliseconds), % of the total, GB and Gop moved and
        computed, their rates, the part of the machine's ceiling that the op reaches, and which matrix it multiplies by.

        Nothing has to be switched on: it tells of the minute after the model's first step; from the first step after a
        call, another minute is profiled, for the next call to tell of. The last line is the measured ceilings; the
        first call in a process measures them, which takes it a second or more: ten milliseconds at a time, between
        steps.
        """

    @abstractmethod
    def get_rank_id(self) -> int:
        """Rank of the process that answers: 0."""

    @abstractmethod
    def get_rank_nums(self) -> int:
        """Ranks that compute together; 1 for an Engine."""

    @abstractmethod
    def is_allspark_work_as_service(self) -> bool:
        """Whether requests are computed by a server group (True for a ClientEngine)."""

    @abstractmethod
    def get_version_full(self) -> str:
        """Version of the engine that computes."""

    # --- adapters ------------------------------------------------------------------------------------------------

    @abstractmethod
    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Load a LoRA adapter, a directory as PEFT writes it, while the model serves; requests then name it as their
        lora_name. lora_name: a directory beside the checkpoint's files; or a path of the server's host, whose last part
        becomes the adapter's name; or NAME=PATH.

        Raises AllSparkError: ALLSPARK_LORA_NOT_FOUND, ALLSPARK_LORA_ALREADY_LOADED,
        ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR (lora_max_num), ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR (lora_max_rank), and
        ALLSPARK_PARAM_ERROR for one that this model cannot have, naming why.
        """

    @abstractmethod
    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Free an adapter. Raises AllSparkError: ALLSPARK_LORA_NOT_FOUND; ALLSPARK_LORA_IN_USE while requests have
        it.
        """

    # --- device memory -------------------------------------------------------------------------------------------

    @abstractmethod
    def unload_device_mem(self, model_name: str) -> AsStatus:
        """Free the memory that a stopped model has of its GPUs; its weights wait in pinned memory of the host, what the
        prefix cache held of the GPU's is lost. Nothing happens if it is free already. AllSparkError for a model that
        runs, or whose memory is the host's.
        """

    @abstractmethod
    def load_device_mem(self, model_name: str) -> AsStatus:
        """Undo unload_device_mem, so that start_model can follow. AllSparkError if others have taken the memory."""

    # --- end -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Idempotent. An Engine stops and frees its models; a client closes its connections."""

    def __enter__(self) -> AbstractEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def request_spec(model_name: Any, inputs: Any, generate_config: Any, want_text: bool | None = None) -> RequestSpec:
    """What start_request was given, checked as far as that needs no model."""
    config = GenerateConfig.parse(generate_config)
    spec = _prompt(_model_name(model_name), inputs)
    spec.config = config
    if want_text is not None and not isinstance(want_text, bool):
        raise TypeError(f"want_text must be a bool or None, not {type(want_text).__name__}")
    if want_text is not None:
        spec.want_text = want_text
    return spec


def ids_of_text(model: Any, text: Any) -> list[int]:
    """A prompt's ids, by a loader's tokenizer."""
    encoded = model.get_tokenizer().encode(_text(text))
    return list(getattr(encoded, "ids", encoded))


def check_config(config: Any) -> AsModelConfig:
    """What install_model was given, checked as far as that needs no model."""
    if not isinstance(config, AsModelConfig):
        raise TypeError(f"config must be an AsModelConfig (a builder's build() gives one), not {type(config).__name__}")
    return config.validate()


def check_handle(handle: Any) -> int:
    """A request handle's type; whether it is known is the engine's to say."""
    if isinstance(handle, bool) or not isinstance(handle, int):
        raise TypeError(f"request_handle must be the int that start_request returned, not {type(handle).__name__}")
    return handle


def _model_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"model_name must be a str, not {type(name).__name__}")
    return name


def _prompt(model_name: str, inputs: Any) -> RequestSpec:
    """A request of this prompt, without a config."""
    spec = RequestSpec(model=model_name)
    if not isinstance(inputs, dict):
        raise TypeError(f"inputs must be a dict such as {{'input_ids': ids}}, not {type(inputs).__name__}")
    known = (*_INPUTS, *(_CHAT if "messages" in inputs else ()))
    for key in inputs:
        if key not in known:
            raise ValueError(f"inputs has no key {key!r}; allowed: {', '.join(known)}{nearest_name(key, known)}")
    prompts = [key for key in inputs if key in _INPUTS]
    if len(prompts) != 1:
        raise ValueError(f"inputs must have exactly one of {', '.join(_INPUTS)}; it has {', '.join(prompts) or 'none'}")
    if "input_ids" in inputs:
        spec.input_ids = as_token_ids(inputs["input_ids"])
    elif "text" in inputs:
        spec.text, spec.want_text = _text(inputs["text"]), True
    else:
        spec.messages, spec.want_text = check_messages(inputs["messages"]), True
        options = {key: inputs[key] for key in _CHAT if inputs.get(key) is not None}
        if options:
            spec.chat = ChatOptions(**options).check()
    return spec


def _queue(queue: Any) -> ResultQueue:
    if not isinstance(queue, ResultQueue):
        raise TypeError(f"result_queue must be the ResultQueue that start_request returned, not {type(queue).__name__}")
    return queue


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, not {type(text).__name__}")
    if not text:
        raise ValueError("text is empty; a prompt needs at least one token")
    return valid_unicode("text", text)
