"""Models named by their id on the Hugging Face Hub (org/name, or org/name@revision): taken from the local cache, and
downloaded into it if there is a network.

A complete model in the cache is used as it is, without asking the Hub for a newer revision, so that a restarted group
serves the same model.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allspark_client.errors import AllSparkError, AsStatus

if TYPE_CHECKING:
    from allspark_client.config import AsModelConfig

logger = logging.getLogger(__name__)

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
#: the files that are downloaded: no code, and no weights of other frameworks
_FILES = ["README.md", "*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja"]
_WEIGHTS, _TORCH_WEIGHTS = ["*.safetensors"], ["pytorch_model*.bin"]
_IGNORED = ["original/*", "onnx/*", "openvino/*"]
_PATHS = ("model_path", "draft_model")


def is_hub_id(path: str) -> bool:
    """Whether a path has the form of a Hub id and names no existing file."""
    return _ID.fullmatch(path) is not None and not os.path.lexists(path)


def hub_name(path: str) -> str:
    """The default name of a model: the last part of its id."""
    return path.partition("@")[0].rpartition("/")[2]


def local_directory(path: str, *, download: bool = True) -> str:
    """The directory of a model: for a Hub id its snapshot in the local cache, otherwise `path` itself.

    An incomplete snapshot is downloaded if `download` allows it, with a progress bar on a terminal. AllSparkError
    (ALLSPARK_IO_ERROR) says why a model is not available.
    """
    found = _ID.fullmatch(path)
    if found is None or not is_hub_id(path):
        return path
    import huggingface_hub
    from huggingface_hub import errors

    where: dict[str, Any] = {"repo_id": found["repo"], "revision": found["revision"]}
    try:
        cached = huggingface_hub.try_to_load_from_cache(filename="config.json", **where)
    except errors.HFValidationError as error:
        raise _unavailable(path, str(error)) from None
    if isinstance(cached, str) and _is_whole(Path(cached).parent):
        return str(Path(cached).parent)
    why = "the local cache has only a part of it" if isinstance(cached, str) else "it is not in the local cache"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise _unavailable(path, f"{why}, and HF_HUB_OFFLINE is set")
    if not download:
        raise _unavailable(path, f"{why}, and clients of this server may not download models")
    logger.info("downloading %s from the Hub", path)
    try:
        return _download(where)
    except errors.GatedRepoError:
        raise _unavailable(path, "its terms must be accepted on the Hub; then set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise _unavailable(path, "the Hub has no such model, or it is private and needs a token (HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        raise _unavailable(path, "the model has no such revision") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _unavailable(path, f"{why}, and the Hub cannot be reached ({first[:300]})") from error


def with_local_paths(config: AsModelConfig, *, download: bool = True) -> AsModelConfig:
    """A copy of a config with Hub ids replaced by directories. Raises as local_directory does."""
    config = copy.deepcopy(config)
    for name in _PATHS:
        setattr(config, name, local_directory(getattr(config, name), download=download))
    return config


def _download(where: dict[str, Any]) -> str:
    import huggingface_hub

    shown: dict[str, Any] = {"ignore_patterns": _IGNORED}
    if not sys.stderr.isatty():
        shown["tqdm_class"] = _silent_bar()
    path = huggingface_hub.snapshot_download(**where, allow_patterns=_FILES + _WEIGHTS, **shown)
    if not any(Path(path).glob(_WEIGHTS[0])):
        path = huggingface_hub.snapshot_download(**where, allow_patterns=_FILES + _TORCH_WEIGHTS, **shown)
    return path


def _is_whole(snapshot: Path) -> bool:
    """Whether a snapshot has all files that a model is loaded from."""
    if not (snapshot / "config.json").exists():
        return False
    for index in snapshot.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False
        return all((snapshot / name).exists() for name in names)
    return any(any(snapshot.glob(pattern)) for pattern in _WEIGHTS + _TORCH_WEIGHTS)


def _unavailable(path: str, why: str) -> AllSparkError:
    return AllSparkError(AsStatus.ALLSPARK_IO_ERROR,
                         f"there is no file or directory {path!r}, and as a model of the Hugging Face Hub it is not "
                         f"available: {why}")


def _silent_bar() -> Any:
    from tqdm.auto import tqdm

    class Silent(tqdm):
        """A progress bar that shows nothing."""

        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **{**named, "disable": True})

    return Silent
