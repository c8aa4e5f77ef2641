"""HuggingFaceModel: opens a Hugging Face checkpoint, serializes it, and prepares matching configurations."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

from allspark_client.config import ASGenerationConfigBuilder, AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.runtime_config import AsModelRuntimeConfigBuilder
from allspark_client.types import RoPEScaleMethod, TargetDevice
from allspark_server.images.settings import SETTINGS_FILES
from allspark_server.models import Graph, ModelConfig, read_config
from allspark_server.models.adapters import with_adapters
from allspark_server.models.sentence_modules import module_files
from allspark_server.runtime.memory import physical_cores
from allspark_server.runtime.native import native_library
from allspark_server.tokenizer.vocabularies import JSON, vocabulary_file
from allspark_server.weights.asgraph import STORED_TYPES, read_graphs, write_graph, write_params
from allspark_server.weights.checkpoint import OpenedModel, open_model
from allspark_server.weights.files import open_regular, read_json, replacing
from allspark_server.weights.formats import Quantization, StoredQuantization, quantization_of
from allspark_server.weights.loader import unquantized_type
from allspark_server.weights.lora import LoraAdapter, open_adapter
from allspark_server.weights.safetensors import ITEM_BYTES
from allspark_server.weights.sources import Source

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "tokenizer.model", "qwen.tiktoken", "chat_template.jinja",
                   "chat_template.json", "generation_config.json")
MEMORY_FOLDER = Path("/dev/shm")
ROPE_SCALINGS = {RoPEScaleMethod.YaRN: "yarn", RoPEScaleMethod.NTK: "dynamic"}


class HuggingFaceModel:
    """Loads, converts and serializes a checkpoint directory or a GGUF file.

    Methods without another result return the object, so that calls can be chained. Code in a checkpoint is never run.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, user_set_data_type: str | None = "auto",
                 in_memory_serialize: bool = False, trust_remote_code: bool = False):
        """path: the directory or GGUF file. name: of the serialized files; slashes become underscores.

        user_set_data_type: the type of serialized weights: "auto" (or None: as stored), "float32", "bfloat16" or
        "float16". in_memory_serialize: serialize_to_path writes to memory. trust_remote_code: ignored, with a warning.
        """
        name = str(name).replace("/", "_")
        if name in ("", ".", ".."):
            raise ValueError(f"name={name!r} cannot be a file name")
        if trust_remote_code:
            logger.warning("trust_remote_code is ignored: code in a checkpoint is never run")
        self.path, self.name = Path(path), name
        self.data_type = self._checked_type("user_set_data_type", user_set_data_type)
        self.in_memory = in_memory_serialize
        self.model_config: ModelConfig | None = None
        self._model: OpenedModel | None = None
        self._rope_scaling: dict[str, Any] | None = None      # instead of config.json's
        self._customized: dict[str, Any] | None = None        # init_quantization's
        self._unquantized = ""
        self._tokenizer: Any = None
        self._files: tuple[Path, Path] | None = None
        self._memory: weakref.finalize | None = None

    @staticmethod
    def _checked_type(argument: str, value: str | None) -> str:
        known = ("auto", *STORED_TYPES)
        if value is not None and value not in known:
            raise ValueError(f"{argument}={value!r} is not known; allowed: {', '.join(known)}")
        return value or "auto"

    # -- reading -------------------------------------------------------------------------------------------------------
    def load_model(self, override_data_type: str | None = None, direct_load: bool = True,
                   load_format: str = "auto") -> HuggingFaceModel:
        """Maps the weight files and checks that every tensor is present with the right type and shape.

        override_data_type: as user_set_data_type. direct_load, load_format: part of DashInfer's signature and ignored;
        weights are always read without transformers, and their format is detected. AllSparkError names the file and the
        problem.
        """
        if override_data_type is not None:
            self.data_type = self._checked_type("override_data_type", override_data_type)
        if load_format not in ("auto", "safetensors", "pt"):
            raise ValueError(f"load_format={load_format!r} is not known; allowed: auto, safetensors, pt")
        self._model = open_model(str(self._checkpoint()), rope_scaling=self._rope_scaling)
        self._unquantized = unquantized_type(self._model.graph, self._model.source)
        self.model_config = self._model.graph.config
        return self

    def read_model_config(self) -> HuggingFaceModel:
        """Reads config.json (or a GGUF file's metadata) into `model_config`."""
        if self._checkpoint().is_dir():
            self.model_config = read_config(self.path, self._rope_scaling)
        else:
            self.model_config = self._opened().graph.config
        return self

    def get_model_context_length(self) -> int:
        """The model's context length in positions, with set_rope_scale_method's scaling."""
        return self._config().max_position_embeddings

    def set_rope_scale_method(self, method: RoPEScaleMethod,
                              parameter_dict: dict[str, Any] | None = None) -> HuggingFaceModel:
        """Replaces config.json's rotary scaling in what is serialized from now on.

        parameter_dict: the fields of rope_scaling, such as {"factor": 4.0, "original_max_position_embeddings": 32768}.
        """
        if not isinstance(method, RoPEScaleMethod):
            raise TypeError(f"method must be a RoPEScaleMethod, not {type(method).__name__}")
        given = dict(parameter_dict or {})
        if method is RoPEScaleMethod.NO_SCALE:
            scaling: dict[str, Any] = {}
        else:
            kind = ROPE_SCALINGS[method]
            named = given.pop("type", given.pop("rope_type", kind))
            if named != kind:
                raise ValueError(f"parameter_dict: type={named!r} contradicts {method}; leave it out or use {kind!r}")
            scaling = {"rope_type": kind, "type": kind, **given}
        self.model_config = read_config(self._directory(), scaling)     # raises if the scaling is wrong
        self._rope_scaling, self._files = scaling, None
        return self.load_model() if self._model is not None else self

    def init_quantization(self, enable: bool = True,
                          customized_quant_config: dict[str, Any] | None = None) -> HuggingFaceModel:
        """Sets the default customized_quant_config for serializing with enable_quant."""
        if customized_quant_config is not None:
            quantization_of(False, customized_quant_config)     # raises if it is wrong
        elif enable:
            path = self._directory() / "config.json"
            if "quantization_config" not in read_json(path):
                raise ValueError(f"{path} has no quantization_config: give a customized_quant_config")
            self.load_model()   # raises if the checkpoint's own quantization is not served
        self._customized = customized_quant_config if enable else None
        return self

    def free_model(self) -> HuggingFaceModel:
        """Releases the mapped weight files."""
        self._model = None
        return self

    def init_tokenizer(self, padding_side: str = "left") -> HuggingFaceModel:
        """Loads the tokenizer: transformers' if it is installed and supports it, otherwise this package's, which does
        not pad.
        """
        directory = self._checkpoint() if self.path.is_dir() else self._opened().tokenizer_dir
        if directory is None:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, f"{self.path} holds no supported tokenizer")
        file = vocabulary_file(directory)
        loader: Any = None
        if file is None or file.name == JSON:
            with contextlib.suppress(ImportError):
                from transformers import AutoTokenizer
                loader = AutoTokenizer
        if loader is None:
            from allspark_server.tokenizer.tokenizer import Tokenizer
            self._tokenizer = Tokenizer.from_dir(directory)
        else:
            self._tokenizer = loader.from_pretrained(str(directory), padding_side=padding_side,
                                                     trust_remote_code=False, local_files_only=True)
        return self

    def get_tokenizer(self) -> Any:
        """The tokenizer: `encode(text)` to ids and `decode(ids)` to text."""
        if self._tokenizer is None:
            self.init_tokenizer()
        return self._tokenizer

    # -- serializing ---------------------------------------------------------------------------------------------------
    def serialize_to_path(self, engine: Any, model_output_dir: str | os.PathLike[str], enable_quant: bool = False,
                          weight_only_quant: bool = False, customized_quant_config: dict[str, Any] | None = None,
                          skip_if_exists: bool = False, multinode_mode: bool = True, lora_cfg: Any = None,
                          text_graph: bool = False) -> HuggingFaceModel:
        """Writes NAME.asgraph and NAME.asparam (and the tokenizer's files into NAME.tokenizer) to `model_output_dir`.

        enable_quant: quantizes the matrices, to "int8" with weight_only_quant and otherwise to "w8a8", or as
        customized_quant_config says (see weights/formats.py). user_set_data_type is then the type of the unquantized
        weights. Loading the files gives the same weights as quantizing the checkpoint when it is loaded.
        skip_if_exists: keeps existing files of this name and format.
        lora_cfg: {"input_base_dir": DIR, "lora_names": [NAME, ...], "lora_only": False}: copies PEFT's adapters
        DIR/NAME beside the model's files, where load_lora(model, NAME) finds them. lora_only: writes nothing else.
        text_graph: writes the op list as text.
        engine, multinode_mode: part of DashInfer's signature and ignored; the files do not depend on the number of
        ranks.
        """
        adapters = self._adapters(lora_cfg) if lora_cfg else {}
        how = self._quantization(enable_quant, weight_only_quant, customized_quant_config)
        if self.in_memory:
            return self._serialize_to_memory(how, text_graph, adapters)
        if not (lora_cfg and lora_cfg.get("lora_only", False)):
            self._serialize(Path(model_output_dir), how, skip_if_exists, text_graph)
        return self._copy_adapters(adapters, Path(model_output_dir))

    def serialize(self, engine: Any, model_output_dir: str | os.PathLike[str] = "", enable_quant: bool = False,
                  weight_only_quant: bool = False, customized_quant_config: dict[str, Any] | None = None,
                  multinode_mode: bool = True, lora_cfg: Any = None) -> HuggingFaceModel:
        """serialize_to_memory if the object was created with in_memory_serialize, otherwise serialize_to_path."""
        if not self.in_memory and not os.fspath(model_output_dir):
            raise ValueError("model_output_dir is empty; without in_memory_serialize=True a directory is needed")
        return self.serialize_to_path(engine, model_output_dir, enable_quant, weight_only_quant,
                                      customized_quant_config, False, multinode_mode, lora_cfg)

    def serialize_to_memory(self, engine: Any, enable_quant: bool = False, weight_only_quant: bool = False,
                            customized_quant_config: dict[str, Any] | None = None, text_graph: bool = False,
                            multinode_mode: bool = True, lora_cfg: Any = None) -> HuggingFaceModel:
        """As serialize_to_path, into files in memory (/dev/shm) that free_memory_serialize_file() removes."""
        adapters = self._adapters(lora_cfg) if lora_cfg else {}
        return self._serialize_to_memory(
            self._quantization(enable_quant, weight_only_quant, customized_quant_config), text_graph, adapters
        )

    def _serialize_to_memory(self, how: Quantization | None, text_graph: bool,
                             adapters: dict[str, LoraAdapter]) -> HuggingFaceModel:
        self.free_memory_serialize_file()
        needed, free = self._serialized_bytes(how), (
            shutil.disk_usage(MEMORY_FOLDER).free if MEMORY_FOLDER.is_dir() else 0
        )
        if needed > free:
            raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR,
                                f"serializing model {self.name!r} to memory needs {needed} bytes, {MEMORY_FOLDER} has "
                                f"{free} free: use serialize_to_path")
        folder = tempfile.mkdtemp(prefix="allspark-", dir=MEMORY_FOLDER)
        self._memory = weakref.finalize(self, shutil.rmtree, folder, True)
        return self._serialize(Path(folder), how, False, text_graph)._copy_adapters(adapters, Path(folder))

    def _adapters(self, config: dict[str, Any]) -> dict[str, LoraAdapter]:
        """The adapters that a lora_cfg names, checked against the model."""
        if not isinstance(config, dict):
            raise TypeError(f"lora_cfg must be a dict, not {type(config).__name__}")
        known = ("input_base_dir", "lora_names", "lora_only")
        for name in config.keys() - set(known):
            raise ValueError(f"lora_cfg: {name!r} is not known; allowed: {', '.join(known)}")
        names = config.get("lora_names", [])
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) and Path(n).name == n for n in names):
            raise ValueError(f"lora_cfg: lora_names={names!r}: expected names of directories in input_base_dir")
        if self.in_memory and config.get("lora_only", False):
            raise ValueError("lora_cfg: lora_only=True needs a directory; in memory the model is always serialized")
        graph, targets = with_adapters(self._opened().graph)
        base = Path(config.get("input_base_dir", "."))
        return {name: open_adapter(base / name, graph, targets, sys.maxsize) for name in names}

    def _copy_adapters(self, adapters: dict[str, LoraAdapter], directory: Path) -> HuggingFaceModel:
        try:
            for name, adapter in adapters.items():
                adapter.copy_to(directory / name)
        except OSError as error:
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"cannot write to {directory}: {error}") from error
        return self

    def _quantization(self, enable: bool, weight_only: bool, customized: dict[str, Any] | None) -> Quantization | None:
        """The requested quantization, or None. As in DashInfer, weight_only_quant without enable_quant means none."""
        if enable:
            return quantization_of(weight_only, customized or self._customized)
        if customized:
            raise ValueError("customized_quant_config is given, but enable_quant is False")
        return None

    def free_memory_serialize_file(self) -> HuggingFaceModel:
        """Removes the files of serialize_to_memory. A model that was installed from them is not affected."""
        if self._memory is not None:
            self._memory()
            self._memory = self._files = None
        return self

    def _serialize(self, directory: Path, how: Quantization | None, skip_if_exists: bool,
                   text_graph: bool) -> HuggingFaceModel:
        graph_path, param_path = directory / f"{self.name}.asgraph", directory / f"{self.name}.asparam"
        if not (skip_if_exists and graph_path.exists() and param_path.exists() and self._is_written(graph_path, how)):
            model, graph = self._opened(), self._graph(how)
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._copy_tokenizer(directory / f"{self.name}.tokenizer")
            except OSError as error:
                raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"cannot write to {directory}: {error}") from error
            quantize = native_library().Executor(num_threads=physical_cores()).quantize_rows if how else None
            write_params(graph, model.source, param_path, self.data_type, quantize, model.tower)
            write_graph(graph, graph_path, text=text_graph, tower=model.tower.graph if model.tower else None)
        self._files = graph_path, param_path
        return self

    def _is_written(self, graph_path: Path, how: Quantization | None) -> bool:
        """Whether a serialized model has the requested rotary scaling and quantization, and its vision tower."""
        graph, tower = read_graphs(graph_path)
        if (tower is None) != (self._opened().tower is None):
            return False
        stored, wanted = graph.quantization, how or self._opened().graph.quantization
        return repr(graph.config.rope) == repr(self._config().rope) and \
            (stored and (stored.format, stored.quantize_head)) == (wanted and (wanted.format, wanted.quantize_head))

    def _copy_tokenizer(self, folder: Path) -> None:
        tokenizer_dir = self._opened().tokenizer_dir
        if tokenizer_dir is not None:
            directory, names = Path(tokenizer_dir), [*TOKENIZER_FILES, *module_files(tokenizer_dir)]
            tower = self._opened().tower
            if tower is not None or not self._opened().graph.generates:
                names.append("config.json")  # how the processor treats images; the names of labels
            if tower is not None:
                names += SETTINGS_FILES
            found = [name for name in names if (directory / name).exists()]
            for name in found:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with open_regular(directory / name) as source, replacing(folder / name) as target:
                    shutil.copyfileobj(source, target)
            folder.mkdir(exist_ok=True)

    def _graph(self, how: Quantization | None) -> Graph:
        """The op list that is serialized."""
        graph = self._opened().graph
        if how is None:
            return graph
        if graph.quantization is not None:
            raise ValueError(f"enable_quant: {self.path} is already quantized ({graph.quantization.format}); serialize "
                             "it without enable_quant")
        unquantized = (
            self._unquantized if self.data_type == "auto" else "bfloat16" if self.data_type == "bfloat16" else "float32"
        )
        return graph.quantized(
            how.formats(graph, unquantized), StoredQuantization(how.format, how.quantize_head, unquantized)
        )

    def _serialized_bytes(self, how: Quantization | None) -> int:
        tower = self._opened().tower
        total = self._bytes_of(self._graph(how), self._opened().source)
        return total + (0 if tower is None else self._bytes_of(tower.graph, tower.source))

    def _bytes_of(self, graph: Graph, source: Source) -> int:
        """Bytes of the tensors of a graph."""
        stored = {part.tensor: (weight, part) for weight in graph.weights.values() for part in weight.parts}
        total = 0
        for name, (weight, part) in stored.items():
            form, columns = weight.stored, weight.columns
            if form is not None:
                row = form.row_bytes(columns) + sum(ITEM_BYTES[kind] * width
                                                    for kind, width in form.scale_tensors(columns).values())
                total += part.stored_rows * row + 4 * columns
                continue
            tensor = source.get(name)
            kind = tensor.dtype if self.data_type == "auto" else STORED_TYPES[self.data_type]
            total += ITEM_BYTES[kind] * tensor.values.size
        return total

    # -- configs -------------------------------------------------------------------------------------------------------
    def create_reference_runtime_config_builder(self, name: str, target_device: TargetDevice | str = TargetDevice.CPU,
                                                device_ids: list[int] | None = None, max_batch: int = 1,
                                                max_context_length: int = -1) -> AsModelRuntimeConfigBuilder:
        """A builder for this model: of the serialized files if there are some, otherwise of the checkpoint.

        max_context_length: engine_max_length; -1 means the default, or the model's context length if that is less.
        """
        builder = AsModelRuntimeConfigBuilder().model_name(name).compute_unit(target_device, device_ids)
        builder.max_batch(max_batch)
        if self._files:
            builder.model_file_path(*map(str, self._files))
        elif self._rope_scaling is not None:
            raise AllSparkError(AsStatus.ALLSPARK_INVALID_CALL_ERROR,
                                "set_rope_scale_method applies to serialized models: call serialize_to_path first")
        else:
            builder.model_dir(str(self._checkpoint()))
        config = self._config()
        if max_context_length != -1:
            builder.max_length(max_context_length)
        elif config.rope.type != "dynamic" and config.max_position_embeddings < AsModelConfig().engine_max_length:
            builder.max_length(config.max_position_embeddings)
        return builder

    def create_reference_generation_config_builder(
            self, runtime_config: AsModelConfig | None = None) -> ASGenerationConfigBuilder:
        """A builder with the sampling settings of the checkpoint's generation_config.json, its end-of-sequence ids, and
        the engine's maximum length.
        """
        path = self.path / "generation_config.json"
        try:
            builder = ASGenerationConfigBuilder(read_json(path) if path.exists() else None)
        except (ValueError, TypeError) as error:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{path}: {error}") from error
        values: dict[str, Any] = {"max_length": runtime_config.engine_max_length} if runtime_config else {}
        if self._config().eos_token_ids:
            values["eos_token_id"] = list(self._config().eos_token_ids)
        return builder.update(values)

    def export_model_diconfig(self, path: str | os.PathLike[str]) -> HuggingFaceModel:
        """Writes an AsModelConfig for this model as JSON, for AsModelConfig.from_dict and `allspark serve --config`;
        into NAME.json if `path` is a directory.
        """
        target = Path(path)
        target = target / f"{self.name}.json" if target.is_dir() else target
        builder = self.create_reference_runtime_config_builder(self.name, max_batch=AsModelConfig().engine_max_batch)
        with replacing(target) as file:
            file.write(json.dumps(builder.build().to_dict(), indent=2).encode() + b"\n")
        return self

    # ------------------------------------------------------------------------------------------------------------------
    def _checkpoint(self) -> Path:
        """The directory or the GGUF file."""
        return self.path if self.path.suffix == ".gguf" and self.path.is_file() else self._directory()

    def _directory(self) -> Path:
        if not self.path.is_dir():
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"{self.path} is not a directory: expected a Hugging Face "
                                                            "checkpoint")
        return self.path

    def _opened(self) -> OpenedModel:
        if self._model is None:
            self.load_model()
        assert self._model is not None
        return self._model

    def _config(self) -> ModelConfig:
        if self.model_config is None:
            self.read_model_config()
        assert self.model_config is not None
        return self.model_config
