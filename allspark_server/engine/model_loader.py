"""Loads models and adapters, and moves device memory, while the steps of other models go on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import ModelInfo

from ..chat import chat_format, chat_format_of, has_unknown_calls
from ..guided import Guide
from ..images import read_processor
from ..weights.files import read_json
from .adapters import AdapterLoader, check_lora
from .device_memory import MemoryMover
from .fingerprint import fingerprint
from .handover import Records
from .image_encoder import ImageEncoder
from .prompt_images import ImageStage
from .served_model import ServedModel

if TYPE_CHECKING:
    from ..runtime.group import Group
    from ..runtime.tower import TowerRunner
    from .engine_thread import EngineThread
    from .output import OutputStage

logger = logging.getLogger(__name__)


class ModelLoader:
    """Loads run in callers' threads; the engine's thread only starts a load and polls for its end.

    `lock`: allows one load at a time, because each plans with the memory that is free. `loading`: the config that is
    being loaded; set on the engine's thread.
    """

    def __init__(
        self, thread: EngineThread, group: Group, waitable_group: Callable[[], Group],
        models: Mapping[str, ServedModel], output: OutputStage, publish: Callable[[AsModelConfig, ServedModel], None],
    ):
        """`waitable_group()`: the group, ready for calls that block until its steps have ended. `publish(config,
        model)`: adds a loaded model. Both run on the engine's thread.
        """
        self.lock = threading.Lock()
        self.loading: AsModelConfig | None = None
        self.adapters = AdapterLoader(thread, waitable_group, self.check_not_released)
        self.memory = MemoryMover(self.lock, thread, waitable_group, self.check_not_released)
        self._thread, self._group, self._waitable_group = thread, group, waitable_group
        self._models, self._output, self._publish = models, output, publish

    def load(self, config: AsModelConfig, start: bool = False, adapters: list[str] | None = None) -> None:
        """Loads a model. `adapters`: LoRA adapters to load with it; None: those of its config."""
        name = config.model_name
        with self.lock:
            self._thread.call(lambda: self._start_load(config))
            try:
                info = self._thread.poll(lambda: self._poll_load(config))
                masks = self._thread.call(lambda: self._group.masks(name))
                tower = self._thread.call(lambda: self._group.tower(name))
                model = open_model(config, info, self._output, self._group.held_spans(), masks,
                                   self._thread.post_if_open, tower)
                if model.host_cache is not None and config.host_cache_dir and self._group.one_host:
                    model.records = Records(config.host_cache_dir, name, info.ranks)
                for lora in config.lora_names if adapters is None else adapters:
                    self.adapters.load(model, check_lora(lora))
                model.running = start
                self._thread.call(lambda: self._finish_load(config, model))
            except BaseException:
                try:
                    self._thread.call(lambda: self.give_up(config))
                except AllSparkError as error:  # the engine was closed meanwhile
                    logger.debug("giving up the load of model %r: %s", name, error)
                raise

    # --- the engine's thread ---

    def check_not_released(self, config: AsModelConfig) -> None:
        """AllSparkError unless the model of exactly this config is being loaded or is installed."""
        model = self._models.get(config.model_name)
        if self.loading is not config and (model is None or model.config is not config):
            raise AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR,
                                f"model {config.model_name!r} was released while it was loaded")

    def give_up(self, config: AsModelConfig) -> None:
        """Ends the load of this config, if it is under way."""
        if self.loading is config:
            self.loading = None
            self._waitable_group().unload(config.model_name)

    def _start_load(self, config: AsModelConfig) -> None:
        name = config.model_name
        if name in self._models:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"a model named {name!r} is installed already; release it first")
        # [0] is the default. Another place checks that the number of GPUs equals the number of ranks.
        if not config.on_gpus and config.device_ids not in ([0], list(range(self._group.size))):
            logger.warning("compute_unit=%r of model %r: the group's %d rank(s) decide where it runs, not these ids",
                           config.compute_unit, name, self._group.size)
        self._waitable_group().start_load(config)
        self.loading = config

    def _poll_load(self, config: AsModelConfig) -> ModelInfo | None:
        self.check_not_released(config)
        return self._waitable_group().poll_load()

    def _finish_load(self, config: AsModelConfig, model: ServedModel) -> None:
        self.check_not_released(config)
        self.loading = None
        self._publish(config, model)


def open_model(
    config: AsModelConfig, info: ModelInfo, output: OutputStage, host_spans: dict[bytes, int] | None, masks: Any,
    post: Callable[[Callable[[], None]], None], tower: TowerRunner | None = None,
) -> ServedModel:
    """A model with its checkpoint's tokenizer, chat format and grammar compiler, and its vision tower. Any thread."""
    tokenizer = guide = None
    if info.tokenizer_dir:
        from ..tokenizer.tokenizer import Tokenizer  # `tokenizers` and jinja2 are not needed to serve ids

        tokenizer = Tokenizer.from_dir(info.tokenizer_dir, config.chat_template)
        info.chat_format = chat_format_of(tokenizer.chat_templates, info.architecture)
        info.chat_format_guessed = has_unknown_calls(tokenizer.chat_templates)
        info.reasoning = chat_format(info.chat_format).reasoning(tokenizer.chat_templates.values()) is not None
        stops = [*tokenizer.stop_ids, *map(tokenizer.mark_id, chat_format(info.chat_format).stops)]
        info.eos_token_ids += [i for i in dict.fromkeys(stops) if i is not None and i not in info.eos_token_ids]
        if not info.only_pools:
            guide = Guide.from_dir(info.tokenizer_dir, info.vocab_size, info.eos_token_ids)
            guide.start()
    gpu = config.device_ids[0] if config.on_gpus else None
    images = _image_stage(config, info, tower, post) if tower is not None else None
    info.sees_images = images is not None
    mark = fingerprint(info, gpu)
    return ServedModel(config, info, tokenizer, mark, output, host_spans, guide, masks, post, images)


def _image_stage(config: AsModelConfig, info: ModelInfo, tower: TowerRunner,
                 post: Callable[[Callable[[], None]], None]) -> ImageStage | None:
    """What a model with a vision tower does with images; None if its checkpoint does not say how they are prepared."""
    directory = Path(info.tokenizer_dir or config.model_path)     # of a serialized model, the former has these files
    described = os.path.lexists(directory / "config.json")
    processor = read_processor(directory, read_json(directory / "config.json")) if described else None
    if processor is None:
        info.no_images_reason = (f"{directory} has {'no preprocessor_config.json' if described else 'no config.json'}, "
                                 "which says how they are prepared")
        logger.warning("model %r refuses images: %s", config.model_name, info.no_images_reason)
        return None
    processor.start()
    # An image that took the whole context would leave no room for a question and its answer.
    processor = processor.within(info.max_length * 3 // 4)
    return ImageStage(processor, ImageEncoder(config.model_name, tower, config.image_cache_memory, post),
                      tower.rotary_parts)
