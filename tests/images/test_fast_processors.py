"""Image processors against transformers' fast ones, in a second environment that has torchvision."""

import json
import os
import subprocess

import numpy as np
import pytest
from PIL import Image

from allspark_client import AllSparkError
from allspark_client.images import Video
from support.images import EncodedFile, add_image_tokens, encoded, noise, processor_of
from support.paths import ROOT
from support.seed import SEED

SIZES = [(1, 1), (1, 150), (150, 1), (1, 300), (27, 29), (29, 27), (56, 56), (64, 96), (2000, 31), (31, 2000),
         (640, 480), (1023, 1025), (4000, 3000)]
QWEN = {"model_type": "qwen3_vl", "image_token_id": 7, "vision_config": {}}
PIXTRAL = {"image_token_index": 7, "spatial_merge_size": 2,
           "vision_config": {"model_type": "pixtral", "patch_size": 14}}
LLAVA = {"image_token_index": 7, "vision_config": {"model_type": "clip_vision_model"}}
SIGLIP = {"image_token_index": 7, "vision_config": {"model_type": "siglip_vision_model", "image_size": 384,
                                                    "patch_size": 14}}
SQUARE = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
QWEN_VIDEO = {"image_token_id": 7, "video_token_id": 8, "vision_config": {}}
# Class, model, settings, and of what the class takes from its caller.
CASES = [
    ("Qwen2VLImageProcessor", QWEN, {}, {}),
    ("Qwen2VLImageProcessor", QWEN, {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216},
                                     "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, {}),
    ("PixtralImageProcessor", {"model_type": "mistral3", **PIXTRAL}, {"size": {"longest_edge": 1540}},
     {"patch_size": 28}),
    ("PixtralImageProcessor", {"model_type": "llava", **PIXTRAL}, {}, {"patch_size": 14}),
    ("Gemma3ImageProcessor", {"model_type": "gemma3", "vision_config": {}},
     {"size": {"height": 896, "width": 896}}, {}),
    ("Gemma4ImageProcessor", {"model_type": "gemma4", "vision_config": {}}, {}, {}),
    ("CLIPImageProcessor", {"model_type": "llava", **LLAVA}, SQUARE, {}),
    ("LlavaNextImageProcessor", {"model_type": "llava_next", **LLAVA}, SQUARE, {}),
    ("SiglipImageProcessor", {"model_type": "llava", **SIGLIP},
     {"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}}, {}),
]


def smooth(rng, width, height):
    """What photographs are made of: gradients and edges."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x * a + y * b + c) for a, b, c in rng.uniform(0, 0.2, (3, 3))]
    return Image.fromarray((127.5 + 127.5 * np.sign(waves) * np.abs(waves) ** 0.5).astype(np.uint8).transpose(1, 2, 0))


def rows_of(processor, result, found):
    """The reference's values in the order of our rows."""
    values = result["pixel_values"]
    if "image_grid_thw" in result:
        assert tuple(result["image_grid_thw"][0]) == found.grid
        return values
    views, down, across = found.grid
    if found.order is not None:     # of LLaVA, whose views may have a row of zeros before their patches
        values = values.reshape(views, 3, *values.shape[-2:])[:, :, :14 * down, :14 * across]
        cut = values.reshape(views, 3, down, 14, across, 14).transpose(0, 2, 4, 1, 3, 5)
        cut = cut.reshape(views, down * across, -1)
        return np.pad(cut, ((0, 0), (processor.leading, 0), (0, 0))).reshape(len(found.patches), -1)
    merge, side = processor.merge, processor.patch
    order = np.arange(down * across).reshape(down // merge, merge, across // merge, merge).transpose(0, 2, 1, 3).ravel()
    if "num_soft_tokens_per_image" in result:
        assert result["num_soft_tokens_per_image"][0] == found.tokens
        assert result["image_position_ids"][0].max(0).tolist() == [across - 1, down - 1]
        return (values[0][:len(order)][order] - np.float32(0.5)) * np.float32(2)
    assert values.shape[2:] == (down * side, across * side)
    cut = values[0].reshape(3, down, side, across, side).transpose(1, 3, 0, 2, 4)
    return cut.reshape(len(order), -1)[order]


def results_of(folder, images, cases=CASES):
    """What the second environment computes: for each case and image, its results by name."""
    np.savez(folder / "images.npz", **{name: np.array(image) for name, image in images.items()})
    cases = [(name, {**settings, **given}) for name, _, settings, given in cases]
    (folder / "cases.json").write_text(json.dumps(cases))
    subprocess.run([os.environ["ALLSPARK_TORCHVISION"], ROOT / "tests" / "support" / "fast_processors.py", folder],
                   check=True, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": ""})
    found = {}
    for key, value in np.load(folder / "results.npz").items():
        case, image, name = key.split("_", 2)
        found.setdefault((int(case), image), {})[name] = value
    return found


@pytest.mark.slow
@pytest.mark.skipif("ALLSPARK_TORCHVISION" not in os.environ, reason="needs a Python that ALLSPARK_TORCHVISION names")
def test_fast_processors(tmp_path):
    """Values are the same bits wherever resizing gives the same pixel, which it does but for roundings."""
    rng = np.random.default_rng(SEED)
    images = {f"{kind}{width}x{height}": make(rng, width, height)
              for width, height in SIZES for kind, make in (("noise", noise), ("smooth", smooth))}
    results = results_of(tmp_path, images)
    add_image_tokens(tmp_path)
    for number, (name, config, settings, _) in enumerate(CASES):
        processor, levels = processor_of(tmp_path, config, settings), []
        for key, image in images.items():
            result = results[number, key]
            try:
                found, = processor.process([EncodedFile(encoded(image, compress_level=1))])
            except AllSparkError as error:
                assert "error" in result, (name, key, error)
                continue
            assert "error" not in result, (name, key, result)
            expected = rows_of(processor, result, found)
            assert expected.shape == found.patches.shape, (name, key)
            std = processor.normalization.std or (0.5,)     # Gemma 4's
            levels.append(np.abs(found.patches - expected).ravel() * (255 * min(std)))
        every = np.concatenate(levels)
        processor.close()
        print(f"\n{name} of {config['model_type']}: {every.size} values, {100 * (every > 0).mean():.2f} % differ, "
              f"{1e6 * (every > 1.5).mean():.1f} ppm by more than one level, at most by {every.max():.1f}")
        assert every[every < 0.5].max() == 0 and every.max() < 2.5, name
        assert (every > 0).mean() < 0.01 and (every > 1.5).mean() < 2e-5, name


FILMS = [
    ("Qwen2VLVideoProcessor", {"model_type": "qwen2_5_vl", **QWEN_VIDEO}, {}, {}),
    ("Qwen2VLVideoProcessor", {"model_type": "qwen2_vl", **QWEN_VIDEO},
     {"min_pixels": 20_000, "max_pixels": 40_000, "image_std": [0.4, 0.5, 0.6]}, {}),
    ("Qwen3VLVideoProcessor", {"model_type": "qwen3_vl", **QWEN_VIDEO},
     {"size": {"shortest_edge": 4096, "longest_edge": 25_165_824}}, {}),
    ("Qwen3VLVideoProcessor", {"model_type": "qwen3_vl", **QWEN_VIDEO}, {}, {}),
]


@pytest.mark.slow
@pytest.mark.skipif("ALLSPARK_TORCHVISION" not in os.environ, reason="needs a Python that ALLSPARK_TORCHVISION names")
def test_video_processors(tmp_path):
    """As of images; frames are those that the request has."""
    rng = np.random.default_rng(SEED)
    films = {f"{count}x{width}x{height}": np.stack([np.array(make(rng, width, height)) for _ in range(count)])
             for count, width, height, make in [(1, 60, 40, noise), (2, 300, 31, smooth), (3, 20, 400, noise),
                                                (5, 640, 480, smooth), (8, 333, 222, noise), (41, 90, 70, smooth)]}
    results = results_of(tmp_path, films, FILMS)
    add_image_tokens(tmp_path)
    for number, (name, config, settings, _) in enumerate(FILMS):
        patch = 16 if "Qwen3" in name else 14
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
        processor = processor_of(tmp_path, config, {"patch_size": patch})
        for key, film in films.items():
            result = results[number, key]
            video = Video(tuple(encoded(Image.fromarray(frame), compress_level=1) for frame in film))
            try:
                found, = processor.process([video])
            except AllSparkError as error:
                assert "error" in result, (name, key, error)
                continue
            assert tuple(result["video_grid_thw"][0].tolist()) == found.grid, (name, key)
            levels = np.abs(found.patches - result["pixel_values_videos"]) * 255 * min(
                processor.videos.normalization.std)
            assert levels.max() < 2.5 and levels[levels < 0.5].max() == 0, (name, key)
            assert (levels > 0).mean() < 0.02 and (levels > 1.5).mean() < 1e-4, (name, key)
        processor.close()
