"""`allspark convert`: a checkpoint as NAME.asgraph and NAME.asparam."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import AddCommand

#: --weight-dtype: customized_quant_config's weight_format and compute_method
QUANTIZED = {"int8": ("int8", "weight_only"), "int4": ("uint4", "weight_only"), "w8a8": ("int8", "activate_quant"),
             "w4a8": ("uint4", "activate_quant")}


def add_command(command: AddCommand) -> None:
    """Adds `convert` to the parser."""
    p = command("convert", convert, "serialize a Hugging Face checkpoint to NAME.asgraph and NAME.asparam")
    p.add_argument("source", metavar="HF_DIR", help="directory with config.json and the weights, or NAME.gguf")
    p.add_argument("target", metavar="OUT", help="directory to write to")
    p.add_argument("--name", help="default: the source directory's name")
    p.add_argument("--weight-dtype", default="auto", metavar="TYPE",
                   help="auto (as stored), float32, bfloat16, float16, or quantized: int8, int4, w8a8, w4a8")
    p.add_argument("--weight-group-size", type=int, default=0, metavar="K",
                   help="of quantized weights: 32 to 512 input features; 0: per output channel (default)")
    p.add_argument("--keep-head", action="store_true",
                   help="quantize all weights but the embedding and the language-model head")


def convert(options: argparse.Namespace) -> int:
    """Runs the command."""
    from allspark_server import HuggingFaceModel
    source = Path(options.source).expanduser().resolve()
    name = options.name or (source.stem if source.suffix == ".gguf" else source.name)
    form: str = options.weight_dtype
    quant: dict[str, Any] = {}
    if form in QUANTIZED:
        weight_format, compute_method = QUANTIZED[form]
        quant = {"enable_quant": True, "customized_quant_config": {
            "weight_format": weight_format, "compute_method": compute_method, "group_size": options.weight_group_size,
            "quantize_head": not options.keep_head}}
        form = "auto"
    elif options.weight_group_size or options.keep_head:
        raise ValueError(
            f"--weight-group-size and --keep-head are for quantized weights, and --weight-dtype is {form}; use one of "
            f"{', '.join(QUANTIZED)}"
        )
    model = HuggingFaceModel(str(source), name, user_set_data_type=form)
    model.load_model()
    model.read_model_config()
    model.serialize_to_path(None, options.target, **quant)
    for path in sorted(Path(options.target).glob(f"{name}.as*")):
        print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")
    return 0
