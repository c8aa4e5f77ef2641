"""Tiny random checkpoints of encoders and classifiers, and what transformers computes with them."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from allspark_client import AsModelConfig, ClientEngine
from support.gemma4 import VOCAB

POOLING_FOLDER, CLS, SEP, PAD = "1_Pooling", 3, 4, 1


@dataclass(frozen=True)
class Spec:
    """A checkpoint: transformers' class, fields of its config, pooling that modules.json says ("": there is none), and
    inputs and outputs of the dense layers after it.
    """

    kind: str
    fields: dict[str, Any] = field(hash=False)
    pooling: str = ""
    dense: tuple[tuple[int, int, str], ...] = ()


def _sizes(hidden: int, heads: int, intermediate: int, layers: int = 3, **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "vocab_size": VOCAB, "pad_token_id": PAD, **more}


ENCODERS = {
    "bert": Spec("BertModel", _sizes(72, 6, 151, max_position_embeddings=400, type_vocab_size=2), "cls"),
    "bert-tanh": Spec("BertModel", _sizes(60, 3, 137, max_position_embeddings=300, type_vocab_size=2,
                                          hidden_act="gelu_new", layer_norm_eps=1e-5)),
    "bert-masked": Spec("BertForMaskedLM", _sizes(48, 4, 97, 2, max_position_embeddings=300, hidden_act="relu"),
                        "lasttoken"),
    "roberta": Spec("RobertaModel", _sizes(56, 7, 131, max_position_embeddings=302, type_vocab_size=1), "mean"),
    "xlm-roberta": Spec("XLMRobertaModel", _sizes(88, 4, 139, max_position_embeddings=702, type_vocab_size=1), "cls",
                        ((88, 33, "Tanh"),)),
    "modernbert": Spec("ModernBertModel", _sizes(72, 6, 151, 4, max_position_embeddings=800, local_attention=34),
                       "mean"),
    "modernbert-biases": Spec("ModernBertModel", _sizes(80, 4, 67, 3, max_position_embeddings=600, local_attention=128,
                                                        norm_bias=True, attention_bias=True, mlp_bias=True,
                                                        global_attn_every_n_layers=2), "cls"),
    "embedding-gemma": Spec("Gemma3TextModel", _sizes(
        84, 6, 151, 7, num_key_value_heads=2, head_dim=18, sliding_window=120, query_pre_attn_scalar=31,
        max_position_embeddings=900, use_bidirectional_attention=True, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}), "mean",
        ((84, 131, "Identity"), (131, 40, "Identity"))),
    "gte": Spec("GteModel", _sizes(88, 4, 139, max_position_embeddings=600, type_vocab_size=1, rope_parameters={
        "rope_type": "linear", "factor": 8 ** (2 / 22), "rope_theta": 160_000.0}), "cls"),
    "bert-gte": Spec("GteModel", _sizes(72, 6, 151, max_position_embeddings=600, type_vocab_size=2), "mean"),
    "gte-no-types": Spec("GteModel", _sizes(60, 3, 67, max_position_embeddings=600, type_vocab_size=0), "cls"),
    "nomic-bert": Spec("NomicBertModel", _sizes(80, 4, 131, max_position_embeddings=600), "mean"),
}
"""Embedders."""

CLASSIFIERS = {
    "bert-classes": Spec("BertForSequenceClassification", _sizes(72, 6, 151, max_position_embeddings=400,
                                                                 num_labels=3)),
    "roberta-classes": Spec("RobertaForSequenceClassification", _sizes(56, 7, 131, max_position_embeddings=302,
                                                                       type_vocab_size=1, num_labels=5)),
    "xlm-roberta-reranker": Spec("XLMRobertaForSequenceClassification", _sizes(
        88, 4, 139, max_position_embeddings=402, type_vocab_size=1, num_labels=1)),
    "modernbert-reranker": Spec("ModernBertForSequenceClassification", _sizes(
        72, 6, 151, 4, max_position_embeddings=800, local_attention=34, num_labels=1, classifier_pooling="mean")),
    "modernbert-classes": Spec("ModernBertForSequenceClassification", _sizes(
        80, 4, 67, 3, max_position_embeddings=600, num_labels=4, classifier_bias=True, classifier_activation="silu")),
    "gte-reranker": Spec("GteForSequenceClassification", _sizes(88, 4, 139, max_position_embeddings=402, num_labels=1)),
    "nomic-bert-classes": Spec("NomicBertForSequenceClassification", _sizes(
        72, 6, 151, max_position_embeddings=400, num_labels=3)),
    "qwen3-reranker": Spec("Qwen3ForSequenceClassification", _sizes(
        72, 14, 151, num_key_value_heads=2, head_dim=24, max_position_embeddings=1024, num_labels=1)),
    "llama-classes": Spec("LlamaForSequenceClassification", _sizes(
        96, 8, 157, num_key_value_heads=4, max_position_embeddings=1024, num_labels=3)),
}
"""Rerankers and other classifiers."""

ALL = ENCODERS | CLASSIFIERS


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="allspark-encoders-")


@functools.cache
def encoder(name: str) -> Path:
    """The directory of a named checkpoint, written on first use and removed when the process ends."""
    spec, directory = ALL[name], Path(_root().name, name)
    config_class = getattr(transformers, spec.kind).config_class
    config = config_class(**spec.fields)
    model = getattr(transformers, spec.kind)(config)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    unit = "Gemma" in spec.kind
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            std, mean = 1.3 * parameter.shape[-1] ** -0.5, 0.0
            if parameter.ndim == 1:
                is_norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
                std, mean = (0.2, 0.0 if unit else 1.0) if is_norm else (0.3, 0.0)
            elif "embed" in parameter_name:
                std = 0.5 * (parameter.shape[-1] ** -0.5 if unit else 1.0)
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    if spec.pooling:
        _write_modules(directory, spec, generator)
    return directory


def _write_modules(directory: Path, spec: Spec, generator: torch.Generator) -> None:
    """The files of sentence-transformers, as its versions 2 to 5 write them."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
               {"idx": 1, "name": "1", "path": POOLING_FOLDER, "type": "sentence_transformers.models.Pooling"}]
    for number, (inputs, outputs, activation) in enumerate(spec.dense, 2):
        folder = directory / f"{number}_Dense"
        folder.mkdir()
        bias = activation != "Identity"
        (folder / "config.json").write_text(json.dumps({
            "in_features": inputs, "out_features": outputs, "bias": bias,
            "activation_function": f"torch.nn.modules.{'activation' if bias else 'linear'}.{activation}"}))
        tensors = {"linear.weight": inputs ** -0.5 * torch.randn(outputs, inputs, generator=generator)}
        if bias:
            tensors["linear.bias"] = 0.3 * torch.randn(outputs, generator=generator)
        save_file(tensors, folder / "model.safetensors")
        modules.append({"idx": number, "name": str(number), "path": folder.name,
                        "type": "sentence_transformers.models.Dense"})
    modules.append({"idx": 9, "name": "9", "path": "9_Normalize", "type": "sentence_transformers.models.Normalize"})
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / POOLING_FOLDER).mkdir()
    names = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    (directory / POOLING_FOLDER / "config.json").write_text(json.dumps({
        "word_embedding_dimension": spec.fields["hidden_size"],
        **{f"pooling_mode_{name}": kind == spec.pooling for kind, name in names.items()},
        "pooling_mode_max_tokens": False}))
    (directory / "config_sentence_transformers.json").write_text(json.dumps({
        "prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": None,
        "similarity_fn_name": "cosine"}))


@functools.cache
def _model(name: str) -> Any:
    kind = ALL[name].kind.replace("ForMaskedLM", "Model")
    return getattr(transformers, kind).from_pretrained(
        encoder(name), dtype=torch.float64, attn_implementation="eager").eval()


@torch.inference_mode()
def expected(name: str, ids: list[int], segments: list[int] | None = None) -> np.ndarray:
    """What transformers computes in float64: an embedding that is not normalized, or the logits of the labels."""
    spec, more = ALL[name], {"token_type_ids": torch.tensor([segments])} if segments is not None else {}
    found = _model(name)(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **more)
    if name in CLASSIFIERS:
        return found.logits[0].numpy()
    rows = found.last_hidden_state[0]
    x = {"cls": rows[0], "lasttoken": rows[-1]}.get(spec.pooling, rows.mean(0))
    for number, (_, _, activation) in enumerate(spec.dense, 2):
        tensors = _dense(name, number)
        x = tensors["linear.weight"].double() @ x
        x = torch.tanh(x + tensors["linear.bias"].double()) if activation == "Tanh" else x
    return x.numpy()


@functools.cache
def _dense(name: str, number: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    return load_file(encoder(name) / f"{number}_Dense" / "model.safetensors")


def add_wordpiece(directory: Path, pair_separators: int = 1) -> None:
    """Writes a WordPiece tokenizer with BERT's template; pair_separators=2 puts two marks between the texts of a pair,
    as RoBERTa does.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789.,:?!'")
    words = ["the", "a", "of", "query", "passage", "cat", "dog", "sat", "mat", "is", "what", "red", "blue", "house"]
    pieces = ["[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]", *words, *letters, *(f"##{c}" for c in letters)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    assert vocabulary["[CLS]"] == CLS and vocabulary["[SEP]"] == SEP and len(pieces) < VOCAB
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]"])
    between = " ".join(["[SEP]"] * pair_separators)
    second = 1 if pair_separators == 1 else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=f"[CLS] $A {between} $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "sep_token": "[SEP]", "cls_token": "[CLS]", "pad_token": "[PAD]",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"][:: 2 - second],
        "tokenizer_class": "PreTrainedTokenizerFast"}))


def install_encoders(engine: ClientEngine, folder: Path, unit: str) -> None:
    """Installs and starts models named embedder, reranker and classifier on `unit`; their files are in `folder`."""
    for name, source in (("embedder", "bert"), ("reranker", "xlm-roberta-reranker"), ("classifier", "bert-classes")):
        directory = shutil.copytree(encoder(source), folder / name)
        add_wordpiece(directory, 2 if name == "reranker" else 1)
        engine.install_model(AsModelConfig(model_name=name, model_path=str(directory), compute_unit=unit,
                                           num_threads=1))
        engine.start_model(name)
