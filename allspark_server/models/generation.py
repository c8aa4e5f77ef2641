"""How a checkpoint's authors recommend to draw from it: generation_config.json."""

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
    """Keys of GenerateConfig that the generation_config.json of a directory sets; none without the file. What is not
    allowed in a request is left out, with a warning: no model is refused for its recommendations.
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
        if name == "temperature" and value == 0:    # what others write for "the likeliest token always"
            defaults["do_sample"] = False
            continue
        try:
            defaults[name] = GenerateConfig(**{name: value})[name]
        except (ValueError, TypeError) as error:
            logger.warning("a sampling default of %s is not used: %s", path, error)
    return defaults
