"""Quantized Hugging Face checkpoints: the names and the packing of each scheme's tensors, one file for each family of
schemes. The result is the checkpoint's own quantized values, scales and zero points (weights/quantized.py): nothing is
quantized again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allspark_client.errors import not_available
from allspark_server.models.config import Fields
from allspark_server.weights.schemes.bitsandbytes import BitsAndBytes
from allspark_server.weights.schemes.compressed import CompressedTensors
from allspark_server.weights.schemes.float8 import BlockFloat8
from allspark_server.weights.schemes.gptq import Awq, Gptq
from allspark_server.weights.schemes.mxfp4 import Mxfp4
from allspark_server.weights.schemes.scheme import QuantizedSource, Scheme
from allspark_server.weights.sources import Source

SCHEMES: dict[str, type[Scheme]] = {
    "gptq": Gptq, "awq": Awq, "compressed-tensors": CompressedTensors, "fp8": BlockFloat8, "fbgemm_fp8": BlockFloat8,
    "bitsandbytes": BitsAndBytes, "mxfp4": Mxfp4,
}


def quantized_source(source: Source, values: dict[str, Any], path: Path) -> QuantizedSource:
    """The source of a checkpoint whose config.json (`path`) has the quantization_config `values`. AllSparkError if the
    scheme is unknown.
    """
    fields = Fields(values, path, "quantization_config.")
    method = fields.get("quant_method", str, "gptq" if "desc_act" in values else None)
    if method is None:
        raise fields.error("quant_method", f"is missing: expected one of {', '.join(SCHEMES)}")
    if method not in SCHEMES:
        raise not_available(f"quant_method {method!r} ({path}; known are {', '.join(SCHEMES)})")
    return QuantizedSource(source, SCHEMES[method](source, fields))
