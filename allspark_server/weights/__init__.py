"""Checkpoints and weights: reading them, dividing them among ranks, handing them to the native library.

`safetensors.py` maps files; `checkpoint.py` finds a model's files and presents any format as one source of tensors;
`asgraph.py` reads and writes the serialized form; `shard.py` says who holds what; `loader.py` fills native matrices.
Nothing is computed from tensor values here, except when small vectors are converted and while serializing.
"""
