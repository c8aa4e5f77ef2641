"""Checks that all hosts of a group have the same checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus

_WHOLE = 8 << 20  # files up to this many bytes are read whole
_SAMPLES, _SAMPLE = 64, 64 << 10  # number and bytes of samples of a larger file, with its first and last bytes
_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".tiktoken", ".jinja", ".gguf", ".asgraph", ".asparam"}


def file_digests(config: AsModelConfig) -> dict[str, str]:
    """Digests of a model's files by path. For large files they cover the size and samples: enough to tell versions of a
    checkpoint apart, but not to find a flipped bit. Files that cannot be read are left out.
    """
    found = {}
    for place in filter(None, (config.model_path, config.weights_path, config.draft_model)):
        path = Path(place)
        if path.is_dir():
            files = [file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES]
        else:
            files = [path, path.with_suffix(".asparam")] if path.suffix == ".asgraph" else [path]
        for file in files:
            if file.is_file() and os.access(file, os.R_OK):
                found[str(file)] = _digest(file)
    return found


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        if size <= _WHOLE:
            digest.update(opened.read())
        else:
            for i in range(_SAMPLES):
                opened.seek((size - _SAMPLE) * i // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def check_copies(name: str, hosts: Mapping[str, Mapping[str, str]]) -> None:
    """AllSparkError if a file of model `name` differs between hosts. hosts: file_digests by host, rank 0's host first.

    Files that a host lacks are ignored: its ranks report missing files themselves.
    """
    (own, wanted), *others = hosts.items()
    for host, found in others:
        for file in sorted(found):
            if found[file] != wanted.get(file, found[file]):
                raise AllSparkError(
                    AsStatus.ALLSPARK_PARAM_ERROR,
                    f"model {name!r}: {file} on host {host} differs from that on host {own}; every host of a group "
                    "needs the same checkpoint")
