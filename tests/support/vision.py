"""Tiny random checkpoints of models that see, their images, and what transformers computes for them."""

from __future__ import annotations

import functools
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from tokenizers import Tokenizer

from allspark_client.images import Image, Video
from allspark_server.engine.image_encoder import _Order
from allspark_server.images import ImageInput, read_processor
from allspark_server.models.network import VisionConfig
from support.checkpoints import _root, randomize
from support.gemma4 import VOCAB
from support.tiny_configs import GEMMA4
from support.tiny_tokenizer import add_tokenizer

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "[IMG_BREAK]", "[IMG_END]", "\n", "\n\n",
         "<|video_pad|>")
START, PAD, END, VIDEO = 3, 4, 5, 10    # their ids in the tiny tokenizer
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 131,
         "num_hidden_layers": 3, "vocab_size": VOCAB, "max_position_embeddings": 2048}
_IDS = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}
PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 96]]
ODD_PINPOINTS = [[26, 52], [52, 26], [52, 52], [78, 26], [26, 104]]
_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 6, "merge_size": 2,
             "temporal_patch_size": 2, "min_pixels": 144, "max_pixels": 40_000},
    "pixtral": {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 6, "width": 6},
                "size": {"longest_edge": 200}},
    "gemma": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 96, "width": 96}},
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 6, "max_soft_tokens": 70,
               "pooling_kernel_size": 3},
    "llava": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 36},
              "crop_size": {"height": 36, "width": 36}},
    "llava_next": {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 24},
                   "crop_size": {"height": 24, "width": 24}, "image_grid_pinpoints": PINPOINTS},
    "llava-qwen2": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 40, "width": 40}},
    "llava-next-qwen2": {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 26},
                         "crop_size": {"height": 26, "width": 26}, "image_grid_pinpoints": ODD_PINPOINTS},
}


def _rope(sections: list[int], head_dim: int, **more: Any) -> dict[str, Any]:
    assert sum(sections) == head_dim // 2
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}}


_MISTRAL = {**_TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
_PIXTRAL = {"model_type": "pixtral", "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3,
            "intermediate_size": 99, "head_dim": 24, "patch_size": 6, "image_size": 240}

_CLIP = {"model_type": "clip_vision_model", "hidden_size": 72, "num_hidden_layers": 4, "num_attention_heads": 3,
         "intermediate_size": 99, "patch_size": 6}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
_GEMMA4 = {"hidden_size": 68, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
           "intermediate_size": 99, "head_dim": 20, "patch_size": 6, "position_embedding_size": 300}

#: by name: the model's type, its class, and the fields of its config.json
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2-vl": ("qwen2_vl", "Qwen2VLForConditionalGeneration", {
        "text_config": {**_TEXT, **_rope([2, 3, 3], 16)},
        "vision_config": {"depth": 3, "embed_dim": 48, "num_heads": 3, "hidden_size": 96, "mlp_ratio": 2,
                          "patch_size": 6}}),
    "qwen2.5-vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {
        "text_config": {**_TEXT, **_rope([2, 3, 3], 16)},
        "vision_config": {"depth": 4, "hidden_size": 80, "num_heads": 4, "intermediate_size": 103,
                          "out_hidden_size": 96, "patch_size": 6, "window_size": 36, "fullatt_block_indexes": [2]}}),
    "qwen3-vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration", {
        "text_config": {**_TEXT, "head_dim": 20, **_rope([4, 3, 3], 20, mrope_interleaved=True)},
        "vision_config": {"depth": 4, "hidden_size": 72, "num_heads": 3, "intermediate_size": 103,
                          "out_hidden_size": 96, "patch_size": 6, "num_position_embeddings": 49,
                          "deepstack_visual_indexes": [0, 2]}}),
    "qwen3-vl-moe": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", {
        "text_config": {**_TEXT, "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 40, **_rope([4, 2, 2], 16, mrope_interleaved=True)},
        "vision_config": {"depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96,
                          "out_hidden_size": 96, "patch_size": 6, "num_position_embeddings": 16,
                          "deepstack_visual_indexes": [1]}}),
    "qwen3.5": ("qwen3_5", "Qwen3_5ForConditionalGeneration", {
        "text_config": {**_TEXT, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_hidden_layers": 4,
                        **_rope([2, 1, 1], 8, mrope_interleaved=True, partial_rotary_factor=0.25)},
        "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96,
                          "out_hidden_size": 96, "patch_size": 6, "num_position_embeddings": 25}}),
    "mistral3": ("mistral3", "Mistral3ForConditionalGeneration", {
        "text_config": _MISTRAL, "vision_config": {**_PIXTRAL, "hidden_act": "silu"}, "spatial_merge_size": 2}),
    "pixtral": ("llava", "LlavaForConditionalGeneration", {
        "text_config": _MISTRAL, "vision_config": {**_PIXTRAL, "hidden_act": "gelu"}, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full"}),
    "llava": ("llava", "LlavaForConditionalGeneration", {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": {**_CLIP, "image_size": 36}}),
    "llava-next": ("llava_next", "LlavaNextForConditionalGeneration", {
        "text_config": {**_MISTRAL, "sliding_window": 100},
        "vision_config": {**_CLIP, "image_size": 24, "hidden_act": "gelu"}, "vision_feature_layer": -1,
        "image_grid_pinpoints": PINPOINTS}),
    # Sides of 40 and 26 pixels are no multiples of a patch, as the published 384 is no multiple of 14.
    "llava-qwen2": ("llava", "LlavaForConditionalGeneration", {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": {**_SIGLIP, "image_size": 40},
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "llava-next-qwen2": ("llava_next", "LlavaNextForConditionalGeneration", {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SIGLIP, "image_size": 26, "hidden_act": "gelu"}, "image_grid_pinpoints": ODD_PINPOINTS,
        "vision_feature_select_strategy": "full", "multimodal_projector_bias": False}),
    "gemma3": ("gemma3", "Gemma3ForConditionalGeneration", {
        "text_config": {**_TEXT, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 50,
                        "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": {"hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 99,
                          "patch_size": 6, "image_size": 96, "vision_use_head": False},
        "mm_tokens_per_image": 16}),
    # As the 31B model: rows of an image see each other in layers with a window, which may be less than the image.
    "gemma4": ("gemma4", "Gemma4ForConditionalGeneration", {
        "text_config": {**GEMMA4["gemma4"].fields, "vocab_size": VOCAB, "use_bidirectional_attention": "vision"},
        "vision_config": {**_GEMMA4, "standardize": True}, "audio_config": None}),
    # As the E2B model: embeddings for every layer, and limits of values.
    "gemma4-small": ("gemma4", "Gemma4ForConditionalGeneration", {
        "text_config": {**GEMMA4["gemma4-small"].fields, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
                        "pad_token_id": 1},
        "vision_config": {**_GEMMA4, "use_clipped_linears": True}, "audio_config": None}),
}
#: the models in which rows of an image see each other
TOGETHER = ("gemma3", "gemma4")


@functools.lru_cache(None)
def checkpoint(name: str) -> Path:
    """Writes a checkpoint of CONFIGS with tokenizer, template and image processor; returns its directory."""
    kind, architecture, fields = CONFIGS[name]
    family = name if name in _PROCESSORS else {"gemma3": "gemma", "mistral3": "pixtral"}.get(
        kind, "qwen" if kind.startswith("qwen") else kind)
    marks = _IDS if family == "qwen" else {"image_token_index": PAD}
    if family == "gemma":
        marks |= {"boi_token_index": START, "eoi_token_index": END}
    elif family == "gemma4":
        marks = {"boi_token_id": START, "eoi_token_id": END, "image_token_id": PAD, "video_token_id": VOCAB,
                 "audio_token_id": VOCAB}
    config = transformers.AutoConfig.for_model(kind, **fields, **marks, tie_word_embeddings="gemma" in family)
    model = getattr(transformers, architecture)(config).eval()
    randomize(model, kind, zlib.crc32(name.encode()))
    directory = _root() / f"vision-{name}"
    model.save_pretrained(directory)
    add_tokenizer(directory, VOCAB, MARKS)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    normalization = {} if family == "gemma4" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if family == "qwen":
        most = 100_000 if kind.startswith("qwen3") else 20_000      # pixels of all frames, or of one
        (directory / "video_preprocessor_config.json").write_text(json.dumps({
            "patch_size": 6, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.4] * 3, "image_std": [0.5] * 3,
            "size": {"shortest_edge": 1000, "longest_edge": most}}))
    (directory / "preprocessor_config.json").write_text(json.dumps({**_PROCESSORS[family], **normalization}))
    return directory


def placed(name: str, ids: list[int]) -> list[int]:
    """The ids of a prompt whose images are written as START, PAD, END, as the processor of a checkpoint takes them: a
    template of Gemma 3 has START alone, and one of Gemma 4 PAD.
    """
    left_out = (PAD, END) if name == "gemma3" else (START, END) if name.startswith("gemma4") else ()
    return [i for i in ids if i not in left_out]


def picture(height: int, width: int, seed: int = 0) -> Image:
    """A random PNG of this size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return Image(file.getvalue())


def film(frames: int, height: int, width: int, fps: float = 2.0, seed: int = 0, **bounds: int) -> Video:
    """A random video."""
    return Video(tuple(picture(height, width, 100 * seed + i).content for i in range(frames)), fps, **bounds)


class Reference:
    """transformers' model of a checkpoint, with the patches of this project's processor."""

    def __init__(self, name: str):
        directory = checkpoint(name)
        self.model = getattr(transformers, CONFIGS[name][1]).from_pretrained(directory, dtype=torch.float32).eval()
        found = read_processor(directory, json.loads((directory / "config.json").read_text()))
        assert found is not None
        self.processor, self._name, self._vision = found, name, VisionConfig(0, found.merge ** 2, 0)

    def inputs(self, ids: list[int], images: list[Image | Video]) -> dict[str, torch.Tensor]:
        """The arguments of the model for a prompt, whose images are expanded already."""
        found = self.processor.process(images)
        given = {"input_ids": torch.tensor([ids])}
        if self._name.startswith("qwen"):
            kinds = {False: [image for image in found if not image.times], True: [each for each in found if each.times]}
            # Output may hold the ids of placeholders, too.
            given["mm_token_type_ids"] = (given["input_ids"] == PAD).to(torch.int32) * bool(kinds[False]) + 2 * (
                given["input_ids"] == VIDEO).to(torch.int32) * bool(kinds[True])
            for is_video, name, grid in ((False, "pixel_values", "image_grid_thw"),
                                         (True, "pixel_values_videos", "video_grid_thw")):
                if kinds[is_video]:
                    given[name] = torch.from_numpy(np.concatenate([image.patches for image in kinds[is_video]]))
                    given[grid] = torch.tensor([image.grid for image in kinds[is_video]])
            if self._name == "qwen2.5-vl" and kinds[True]:
                given["second_per_grid_ts"] = torch.tensor([2 / each.fps for each in images if isinstance(each, Video)])
            return given
        if self._name.startswith("gemma4"):
            given["mm_token_type_ids"] = (given["input_ids"] == PAD).to(torch.int32)
            most = self.processor.soft_tokens * self.processor.merge ** 2
            patches = np.zeros((len(found), most, found[0].patches.shape[1]), np.float32)
            places = np.full((len(found), most, 2), -1)
            for i, image in enumerate(found):       # in the order of their rows, which makes no difference
                patches[i, :len(image.patches)] = image.patches / 2 + 0.5
                places[i, :len(image.patches)] = _Order.of(image, self._vision).places[:, :0:-1]
            return {**given, "pixel_values": torch.from_numpy(patches), "image_position_ids": torch.from_numpy(places)}
        if self._name.startswith("llava"):
            return {**given, **self._views(found, images)}
        pixels = [self._pixels(image) for image in found]
        sizes = np.array([each.shape[1:] for each in pixels])
        padded = np.zeros((len(pixels), 3, *sizes.max(0)), np.float32)
        for room, each in zip(padded, pixels):
            room[:, :each.shape[1], :each.shape[2]] = each
        if self._name.startswith("gemma"):
            return {**given, "token_type_ids": (given["input_ids"] == PAD).to(torch.int64),
                    "pixel_values": torch.from_numpy(padded)}
        return {**given, "pixel_values": torch.from_numpy(padded), "image_sizes": torch.from_numpy(sizes)}

    def _views(self, found: list[ImageInput], images: list[Image]) -> dict[str, torch.Tensor]:
        """The pixels of the images' views, [3, side, side] each."""
        side, patch, leading = self.processor.side, self.processor.patch, self.processor.leading
        across, most = side // patch, max(image.grid[0] for image in found)
        pixels = np.zeros((len(found), most, 3, side, side), np.float32)
        seen = slice(across * patch)        # the tower leaves out what remains
        for room, image in zip(pixels, found):
            parts = image.patches.reshape(image.grid[0], -1, 3 * patch * patch)[:, leading:]
            room[:image.grid[0], :, seen, seen] = parts.reshape(-1, across, across, 3, patch, patch).transpose(
                0, 3, 1, 4, 2, 5).reshape(-1, 3, across * patch, across * patch)
        if CONFIGS[self._name][0] == "llava":
            return {"pixel_values": torch.from_numpy(pixels[:, 0])}
        sizes = [Pillow.open(io.BytesIO(image.content)).size[::-1] for image in images]
        return {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.tensor(sizes)}

    def _pixels(self, image: ImageInput) -> np.ndarray:
        """The pixels of an image's patches, [3, height, width]."""
        (_, rows, columns), merge, patch = image.grid, self.processor.merge, self.processor.patch
        parts = image.patches.reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
        return parts.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)

    def encode(self, words: str) -> list[int]:
        """The ids of a text."""
        found = Tokenizer.from_file(str(checkpoint(self._name) / "tokenizer.json"))
        return found.encode(words, add_special_tokens=False).ids

    def generated(self, ids: list[int], images: list[Image | Video], count: int) -> tuple[list[int], np.ndarray]:
        """Greedy tokens, and the logits of each."""
        found = self.model.generate(**self.inputs(ids, images), max_new_tokens=count, min_new_tokens=count,
                                    do_sample=False, eos_token_id=None, output_logits=True,
                                    return_dict_in_generate=True)
        return found.sequences[0, len(ids):].tolist(), torch.cat(found.logits).float().numpy()

    def rows(self, ids: list[int], images: list[Image | Video]) -> np.ndarray:
        """What the layers of the text model take at the places of images, [rows, hidden size]."""
        seen: list[torch.Tensor] = []

        def take(module: torch.nn.Module, args: object, given: dict[str, torch.Tensor]) -> None:
            seen.append(given["inputs_embeds"][0])

        handle = self.model.model.language_model.register_forward_pre_hook(take, with_kwargs=True)
        self.logits(ids, images)
        handle.remove()
        return seen[0][torch.tensor(ids) == PAD].float().numpy()

    def logits(self, ids: list[int], images: list[Image | Video]) -> np.ndarray:
        """Logits of all positions, [positions, vocabulary]."""
        with torch.no_grad():
            return self.model(**self.inputs(ids, images)).logits[0].float().numpy()
