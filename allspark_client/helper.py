"""DashInfer's `dashinfer.helper`: a model described by a JSON file, and requests as plain objects."""
from __future__ import annotations

import copy
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .config import AsModelConfig
from .errors import AllSparkError, AsStatus, nearest_name
from .types import GenerateRequestStatus

logger = logging.getLogger(__name__)

_TYPES = {"float32", "bfloat16", "float16"}
_BITS = {"int8": "int8", "uint8": "int8", "int4": "uint4", "uint4": "uint4"}


class QuantizeConfig:
    """How a conversion quantizes weights.

    Args:
        activation_type: "int8" for integer GEMMs; otherwise the type that weights are dequantized to.
        weight_type: "int8", "uint8", "int4" or "uint4".
        quant_settings, quan_json: not available; must be None.
        extra_option: {"SubChannel": whether groups of columns share a scale, "GroupSize": columns in a group}.
    """

    def __init__(self, activation_type: str = "bfloat16", weight_type: str = "uint8", quant_settings: Any = None,
                 quan_json: dict[str, Any] | None = None,
                 extra_option: dict[str, Any] | None = None):
        if quant_settings is not None or quan_json is not None:
            raise ValueError("quant_settings and quan_json describe quantized checkpoints, which are not available "
                             "yet; use extra_option")
        if str(weight_type).lower() not in _BITS:
            raise ValueError(f"weight_type={weight_type!r} is not known; allowed: {', '.join(_BITS)}")
        self.activation_type, self.weight_type = str(activation_type), str(weight_type)
        self.extra_option = {"SubChannel": False, "GroupSize": 512, **(extra_option or {})}

    def customized(self) -> dict[str, Any]:
        """The argument customized_quant_config of HuggingFaceModel.serialize_to_path."""
        option = self.extra_option
        return {"weight_format": _BITS[self.weight_type.lower()],
                "group_size": int(option["GroupSize"]) if option["SubChannel"] else 0,
                "compute_method": "activate_quant" if self.activation_type.lower() in ("int8", "uint8")
                else "weight_only"}


class ConfigManager:
    """Reads, checks and writes configs of EngineHelper, which are plain dicts."""

    @staticmethod
    def save_config_as_json(config: dict[str, Any], file_path: str | os.PathLike[str]) -> None:
        """Write a config to a JSON file."""
        with open(file_path, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=4)

    @staticmethod
    def get_config_from_json(file_path: str | os.PathLike[str]) -> dict[str, Any]:
        """The config in a JSON file, without defaults. Raises ValueError if it is missing or no JSON object."""
        if not os.path.exists(file_path):
            raise ValueError(f"{file_path} does not exist")
        try:
            with open(file_path, encoding="utf-8") as file:
                config = json.load(file)
        except ValueError as error:
            raise ValueError(f"{file_path} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{file_path} holds a {type(config).__name__}; it must hold an object")
        return config

    @staticmethod
    def get_default_config() -> dict[str, Any]:
        """The default of every key."""
        return {
            "model_name": "", "model_type": "", "model_path": "~/dashinfer_models/", "data_type": "float32",
            "device_type": "CPU", "device_ids": [0], "multinode_mode": False,
            "convert_config": {"do_dynamic_quantize_convert": False},
            "engine_config": {"engine_max_length": 2048, "engine_max_batch": 8, "do_profiling": False, "num_threads": 0,
                              "matmul_precision": "medium"},
            "generation_config": {"temperature": 1.0, "early_stopping": True, "top_k": 1024, "top_p": 0.8,
                                  "repetition_penalty": 1.1, "presence_penalty": 0.0, "min_length": 0,
                                  "max_length": 2048, "no_repeat_ngram_size": 0, "eos_token_id": -1,
                                  "stop_words_ids": [], "seed": 1234},
            "quantization_config": {"activation_type": "bfloat16", "weight_type": "uint8", "SubChannel": True,
                                    "GroupSize": 64},
        }

    @staticmethod
    def recursive_merge(dict1: dict[str, Any], dict2: dict[str, Any]) -> dict[str, Any]:
        """Set dict1's values to those of dict2 that are not None, recursively; returns dict1."""
        for key, value in dict2.items():
            if isinstance(value, dict) and isinstance(dict1.get(key), dict):
                ConfigManager.recursive_merge(dict1[key], value)
            elif value is not None:
                dict1[key] = value
        return dict1

    @staticmethod
    def check_config(config: dict[str, Any]) -> None:
        """Raises ValueError naming a wrong key or value. `model_type` is not used: the checkpoint names its family."""
        known = ConfigManager.get_default_config()
        for key in config:
            if key not in known:
                raise ValueError(f"config has no key {key!r}{nearest_name(key, known)}")
        for key in ("model_name", "model_type", "model_path"):
            if not isinstance(config.get(key), str) or not config[key]:
                raise ValueError(f"config[{key!r}] is {config.get(key)!r}; it must be text")
        if config["data_type"] not in _TYPES:
            raise ValueError(f"config['data_type'] is {config['data_type']!r}; allowed: {', '.join(sorted(_TYPES))}")
        ids = config["device_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"config['device_ids'] is {ids!r}; it must be a list of NUMA nodes")

    @staticmethod
    def create_config(user_config: dict[str, Any]) -> dict[str, Any]:
        """A user's config with defaults for missing keys, checked."""
        config = ConfigManager.recursive_merge(ConfigManager.get_default_config(), copy.deepcopy(user_config))
        ConfigManager.check_config(config)
        return config


@dataclass
class HelperRequest:
    """One request and, once it is processed, its result. context_time and generate_time are in seconds."""

    id: int = -1
    model_info: str | None = None
    torch_input: dict[str, Any] | None = None
    in_text: str | None = None
    in_tokens: list[int] | None = None
    in_tokens_len: int | None = None
    out_text: str | None = None
    out_tokens: list[int] | None = None
    out_tokens_len: int | None = None
    status: int | None = None
    gen_cfg: dict[str, Any] | None = None
    start_timestamp: str | None = None
    end_timestamp: str | None = None
    context_time: float = 0.0
    generate_time: float = 0.0
    handle: Any = field(default=None)
    queue: Any = field(default=None)


class EngineHelper:
    """Converts a checkpoint and runs it, as a config of ConfigManager describes.

    With several device_ids, or with multinode_mode, it starts a group of $AS_NUMA_NUM ranks; otherwise it makes an
    Engine in this process.
    """

    Request = HelperRequest

    def __init__(self, user_config: dict[str, Any]):
        config = ConfigManager.create_config(user_config)
        self.config = config
        self.model_type, self.data_type = config["model_type"], config["data_type"]
        self.model_path = os.path.expanduser(config["model_path"])
        self.device_type, self.device_ids = config["device_type"], list(config["device_ids"])
        self.multinode_mode = bool(config["multinode_mode"]) or len(self.device_ids) > 1
        self.convert_config, self.engine_config = config["convert_config"], config["engine_config"]
        self.default_gen_cfg: dict[str, Any] = config["generation_config"]
        self.quant_config: QuantizeConfig | None = None
        kind = self.data_type
        if self.convert_config.get("do_dynamic_quantize_convert"):
            quantization = config["quantization_config"]
            self.quant_config = QuantizeConfig(quantization["activation_type"], quantization["weight_type"],
                                               extra_option={k: quantization[k] for k in ("SubChannel", "GroupSize")})
            kind += "_a16w4" if "4" in quantization["weight_type"] else "_a16w8"
        self.model_name = "_".join((config["model_name"], self.device_type.lower(),
                                    "multi" if self.multinode_mode else "single", kind))
        self.verbose = False
        self.tokenizer: Any = None
        self.engine = self._make_engine()

    def _make_engine(self) -> Any:
        if self.multinode_mode:
            from .client import ClientEngine
            return ClientEngine()
        from allspark_server import Engine
        return Engine()

    # --- the model -----------------------------------------------------------------------------------------------

    def _files(self) -> tuple[str, str]:
        base = os.path.join(self.model_path, self.model_name)
        return f"{base}.asgraph", f"{base}.asparam"

    def init_tokenizer(self, hf_model_path: str) -> None:
        """Load a checkpoint's tokenizer. Its end-of-sequence id is the default if the config has none (-1 or [])."""
        self.tokenizer = self._loader(hf_model_path).init_tokenizer().get_tokenizer()
        if self.default_gen_cfg.get("eos_token_id") in (-1, [], None):
            eos = self.tokenizer.eos_token_id
            self.default_gen_cfg["eos_token_id"] = -1 if eos is None else eos

    def _loader(self, hf_model_path: str) -> Any:
        from allspark_server import HuggingFaceModel
        return HuggingFaceModel(hf_model_path, self.model_name, user_set_data_type=self.data_type)

    def check_model_exist(self) -> bool:
        """Whether the converted files exist."""
        missing = [path for path in self._files() if not os.path.exists(path)]
        if missing:
            logger.info("not converted yet: %s is missing", missing[0])
        return not missing

    def convert_model(self, hf_model_path: str) -> None:
        """Convert a checkpoint into the directory model_path of the config."""
        quant: dict[str, Any] = {}
        if self.quant_config is not None:
            quant = {"enable_quant": True, "customized_quant_config": self.quant_config.customized()}
        self._loader(hf_model_path).load_model().serialize_to_path(self.engine, self.model_path, **quant)

    def init_engine(self) -> None:
        """Load and start the converted model. Raises AllSparkError (ALLSPARK_IO_ERROR) if it is not converted yet.

        `matmul_precision` has no effect: the weights' type determines the precision.
        """
        graph, param = self._files()
        if not self.check_model_exist():
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{graph} does not exist: call convert_model first")
        options = self.engine_config
        config = AsModelConfig(model_name=self.model_name, model_path=graph, weights_path=param,
                               engine_max_length=options["engine_max_length"],
                               engine_max_batch=options["engine_max_batch"], num_threads=options["num_threads"],
                               compute_unit=f"{self.device_type}:{self.device_ids[0]}")
        self.engine.install_model(config)
        self.engine.start_model(self.model_name)

    def uninit_engine(self) -> None:
        """Stop and free the model."""
        if self.engine_config["do_profiling"]:
            logger.info("%s", self.engine.get_op_profiling_info(self.model_name))
        self.engine.stop_model(self.model_name)
        self.engine.release_model(self.model_name)

    # --- requests ------------------------------------------------------------------------------------------------

    def create_request(self, prompt: list[Any], gen_cfg: list[dict[str, Any]] | None = None) -> list[HelperRequest]:
        """Requests for prompts, each a text or a list of ids. `gen_cfg`: a config for each; None: the default."""
        if not prompt:
            raise ValueError("prompt is empty; give a list of texts, or of lists of ids")
        if gen_cfg is not None and len(gen_cfg) != len(prompt):
            raise ValueError(f"gen_cfg has {len(gen_cfg)} configs for {len(prompt)} prompts; give one for each")
        requests = []
        for i, given in enumerate(prompt):
            text: str | None
            if isinstance(given, str):
                text, encoded = given, self.tokenizer.encode(given)
                ids = list(getattr(encoded, "ids", encoded))
            elif isinstance(given, (list, tuple)):
                ids = list(given)
                text = None if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=False)
            else:
                raise TypeError(f"prompt[{i}] must be text or a list of ids, not {type(given).__name__}")
            config = gen_cfg[i] if gen_cfg is not None else self.default_gen_cfg
            requests.append(HelperRequest(i, self.model_name, {"input_ids": ids}, text, ids, len(ids), gen_cfg=config))
        return requests

    def process_one_request(self, request: HelperRequest) -> None:
        """Run a request to its end; its fields then hold the result. Raises AllSparkError if it fails."""
        for _ in self.process_one_request_stream(request):
            pass

    def process_one_request_stream(self, request: HelperRequest) -> Iterator[str]:
        """Run a request and yield its whole text so far whenever tokens arrive. Raises AllSparkError if it fails."""
        request.start_timestamp, begin = _now(), time.perf_counter()
        _, request.handle, request.queue = self.engine.start_request(
            self.model_name, request.torch_input or {"input_ids": request.in_tokens}, request.gen_cfg)
        ids: list[int] = []
        try:
            for elements in request.queue:
                if not ids:
                    request.context_time = time.perf_counter() - begin
                ids += elements.ids_from_generate
                request.status = int(request.queue.GenerateStatus())
                request.out_tokens, request.out_tokens_len = ids, len(ids)
                request.out_text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
                yield request.out_text
        finally:
            request.generate_time = time.perf_counter() - begin - request.context_time
            request.end_timestamp = _now()
            self.engine.release_request(self.model_name, request.handle)
            request.status = int(request.queue.GenerateStatus())
        if request.status == GenerateRequestStatus.GenerateFinished:
            self.print_inference_result(request)

    def print_inference_result(self, request: HelperRequest) -> None:
        """Log a request and its answer if `verbose` is set."""
        if self.verbose:
            logger.info("request %d: %d tokens in, %s out, %.3f s to the first, %.3f s then\n%s\n%s", request.id,
                        request.in_tokens_len, request.out_tokens_len, request.context_time, request.generate_time,
                        request.in_text, request.out_text)

    def print_inference_result_all(self, request_list: list[HelperRequest]) -> None:
        """Log requests and their answers if `verbose` is set."""
        for request in request_list:
            self.print_inference_result(request)

    def print_profiling_data(self, request_list: list[HelperRequest], total_time: float = 0.0) -> None:
        """Log means over requests and, if their `total_time` in seconds is given, the throughput."""
        count = len(request_list)
        if not count:
            raise ValueError("request_list is empty")
        output = sum(r.out_tokens_len or 0 for r in request_list)
        rate = f", {output / total_time:.1f} tokens/s, {count / total_time:.2f} requests/s" if total_time > 0 else ""
        logger.info("%d requests: mean of %.1f tokens in, %.1f out, %.3f s to the first, %.3f s then%s", count,
                    sum(r.in_tokens_len or 0 for r in request_list) / count, output / count,
                    sum(r.context_time for r in request_list) / count,
                    sum(r.generate_time for r in request_list) / count, rate)

    @staticmethod
    def convert_request_to_jsonstr(request: HelperRequest) -> str:
        """A request as JSON; values without a JSON form are null."""
        return json.dumps(vars(request), ensure_ascii=False, default=lambda value: None)

    def fetch_config(self) -> dict[str, Any]:
        """The config with its defaults."""
        return self.config


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
