"""The sampling defaults that a checkpoint's authors recommend: generation_config.json."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from allspark_client.config import GenerateConfig
from allspark_client.errors import AllSparkError
from allspark_server.weights.files import read_json

logger = logging.getLogger(__name__)

_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(directory: str | None) -> dict[str, Any]:
    """The keys of GenerateConfig that generation_config.json in `directory` sets; empty without the file.

    A value that a request could not have is left out with a warning, so that it does not keep the model from loading.
    """
    path = Path(directory or "", "generation_config.json")
    if not directory or not os.path.lexists(path):
        return {}
    try:
        found = read_json(path)
    except AllSparkError as error:
        logger.warning("the checkpoint's sampling defaults are not used: %s", error.message)
        return {}
    defaults: dict[str, Any] = {}
    for name in _KEYS:
        value = found.get(name)
        if value is None or name not in GenerateConfig.field_names():
            continue
        if name == "temperature" and value == 0:    # a common way to write greedy decoding
            defaults["do_sample"] = False
            continue
        try:
            defaults[name] = GenerateConfig(**{name: value})[name]
        except (ValueError, TypeError) as error:
            logger.warning("a sampling default of %s is not used: %s", path, error)
    return defaults
