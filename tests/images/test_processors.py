"""Image processors against those of transformers: sizes, order of patches and normalization exactly."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from allspark_client import AllSparkError
from support.images import SIZES, EncodedFile, add_image_tokens, encoded, noise, processor_of, resize_as_torchvision
from support.seed import SEED

QWEN = {"model_type": "qwen2_5_vl", "image_token_id": 7, "vision_config": {}}
PIXTRAL = {"model_type": "llava", "image_token_index": 7, "vision_config": {"model_type": "pixtral", "patch_size": 16}}
MISTRAL3 = {"model_type": "mistral3", "image_token_index": 7, "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 14}}
GEMMA3 = {"model_type": "gemma3", "image_token_index": 7, "boi_token_index": 8, "eoi_token_index": 9,
          "mm_tokens_per_image": 4, "vision_config": {"patch_size": 14, "image_size": 112}}
LLAVA = {"model_type": "llava", "image_token_index": 7, "vision_config": {
    "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}}
SIGLIP = {"model_type": "llava", "image_token_index": 7, "vision_config": {
    "model_type": "siglip_vision_model", "image_size": 61, "patch_size": 14}}
GEMMA4 = {"model_type": "gemma4", "image_token_id": 7, "boi_token_id": 8, "eoi_token_id": 9, "vision_config": {}}


@pytest.fixture(params=[SEED], ids=lambda s: f"seed{s}")
def rng(request):
    return np.random.default_rng(request.param)


@pytest.fixture
def read(tmp_path):
    """Reads processors, and ends their processes after the test."""
    found = []
    add_image_tokens(tmp_path)

    def read(config, settings):
        found.append(processor_of(tmp_path, config, settings))
        return found[-1]

    yield read
    for processor in found:
        processor.close()


def test_resizing_is_torchvisions(rng, read):
    """Pixels after resizing in both directions, against the kernel that torchvision calls for 8 bits."""
    decoder = read(QWEN, {}).decoder
    for width, height, wide, high in [(640, 480, 644, 476), (27, 29, 56, 28), (100, 100, 56, 140), (500, 30, 84, 28),
                                      (31, 500, 28, 560), (5, 3, 5, 56), (5, 3, 56, 3)]:
        image = noise(rng, width, height)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        for resample, mode in ((2, "bilinear"), (3, "bicubic")):
            found = decoder.decode(encoded(image), lambda *_: (high, wide), resample).astype(int)
            expected = torch.nn.functional.interpolate(pixels, (high, wide), mode=mode, antialias=True)
            difference = abs(found - expected[0].permute(1, 2, 0).numpy().astype(int))
            assert difference.max() <= 2 and (difference > 1).mean() < 1e-3, (width, height, wide, high, mode)


@pytest.mark.parametrize("settings", [
    {}, {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}, "image_mean": [0.5] * 3,
         "image_std": [0.5, 0.4, 0.3]},
    {"min_pixels": 3136, "max_pixels": 12544, "size": {"shortest_edge": 1, "longest_edge": 2}, "do_rescale": False},
    {"do_normalize": False, "merge_size": 1, "temporal_patch_size": 3, "resample": 2},
])
def test_qwen(rng, read, monkeypatch, settings):
    processor = read(QWEN, settings)
    resize_as_torchvision(monkeypatch)
    reference = Qwen2VLImageProcessorPil(**settings)
    images = [noise(rng, *size) for size in SIZES]
    found = processor.process([EncodedFile(encoded(image)) for image in images])
    expected = reference(images=images, return_tensors="np")
    assert [each.grid for each in found] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    np.testing.assert_allclose(np.concatenate([each.patches for each in found]), expected["pixel_values"],
                               rtol=1e-6, atol=1e-6)
    for image, each in zip(images, found):
        assert each.patches.dtype == np.float32 and each.patches.flags.c_contiguous
        assert each.tokens == each.grid[1] * each.grid[2] // processor.merge ** 2
        assert len(each.patches) == each.grid[1] * each.grid[2]
        assert each.digest == processor.digest(EncodedFile(encoded(image)))


def rows_of(pixels, grid, patch, merge):
    """The rows of an image, float32 [channels, height, width]: blocks in raster order, their patches likewise."""
    _, down, across = grid
    order = [(y + j, x + i) for y in range(0, down, merge) for x in range(0, across, merge)
             for j in range(merge) for i in range(merge)]
    return np.stack([pixels[:, y * patch:(y + 1) * patch, x * patch:(x + 1) * patch] for y, x in order])


@pytest.mark.parametrize("config, settings, merge, patch", [
    (PIXTRAL, {}, 1, 16), (PIXTRAL, {"size": {"longest_edge": 300}, "resample": 2}, 1, 16),
    (MISTRAL3, {"size": {"longest_edge": 200}}, 2, 14), (MISTRAL3, {"size": {"height": 100, "width": 300}}, 2, 14),
])
def test_pixtral(rng, read, monkeypatch, config, settings, merge, patch):
    processor = read(config, {**settings, "image_processor_type": "PixtralImageProcessorFast"})
    resize_as_torchvision(monkeypatch)
    reference = PixtralImageProcessorPil(**settings)
    for size in [size for size in SIZES if max(size) < 150 * min(size)]:
        image = noise(rng, *size)
        found, = processor.process([EncodedFile(encoded(image))])
        expected = reference(images=[image], patch_size=patch * merge, return_tensors="np")      # as its caller does
        height, width = expected["image_sizes"][0]
        assert found.grid == (1, height // patch, width // patch) and not processor.takes_pixels
        assert found.tokens * merge ** 2 == len(found.patches)
        rows = rows_of(expected["pixel_values"][0], found.grid, patch, merge)
        np.testing.assert_allclose(found.patches, rows.reshape(len(rows), -1), rtol=1e-6, atol=1e-6)
    with pytest.raises(AllSparkError, match="image 1 of the request has 2000 x 1 pixels, and nothing would be left"):
        processor.process([EncodedFile(encoded(noise(rng, 2000, 1)))])


def test_gemma3(rng, read, monkeypatch):
    settings = {"size": {"height": 112, "width": 112}, "do_pan_and_scan": None}
    processor = read(GEMMA3, settings)
    resize_as_torchvision(monkeypatch)
    images = [noise(rng, *size) for size in SIZES]
    found = processor.process([EncodedFile(encoded(image)) for image in images])
    expected = Gemma3ImageProcessorPil(**settings)(images=images, return_tensors="np")["pixel_values"]
    for each, pixels in zip(found, expected):
        rows = rows_of(pixels, (1, 8, 8), 14, 4)
        assert (each.grid, each.tokens, processor.merge) == ((1, 8, 8), 4, 4)
        np.testing.assert_allclose(each.patches, rows.reshape(len(rows), -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", [{"max_soft_tokens": 70}, {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3]}])
def test_gemma4(rng, read, monkeypatch, settings):
    processor = read(GEMMA4, settings)
    resize_as_torchvision(monkeypatch)
    reference = Gemma4ImageProcessorPil(**settings)
    for size in [*SIZES, (3000, 5), (5, 3000), (900, 900)]:
        image = noise(rng, *size)
        found, = processor.process([EncodedFile(encoded(image))])
        expected = reference(images=[image], return_tensors="np")
        places = expected["image_position_ids"][0]
        known = {tuple(place): row for place, row in zip(places.tolist(), expected["pixel_values"][0]) if place[0] >= 0}
        width, height = (1 + max(axis) for axis in zip(*known))
        assert found.grid == (1, height, width) and found.tokens == expected["num_soft_tokens_per_image"][0]
        pixels = np.array([[known[x, y] for x in range(width)] for y in range(height)])
        rows = rows_of(pixels.transpose(2, 0, 1), found.grid, 1, 3)
        np.testing.assert_allclose(found.patches, 2 * (rows[:, :, 0, 0] - 0.5), rtol=1e-6, atol=1e-6)
        assert processor.within(9).size(*size[::-1], None) == size_within(*size, 9)


def size_within(width, height, tokens):
    """The size in pixels of an image of Gemma 4 with as many tokens."""
    return get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)


def views_of(found, patch, leading=1):
    """The pixels of an image's views, without the rows of class tokens: [views, 3, side, side]."""
    views, across, _ = found.grid
    rows = found.patches.reshape(views, -1, 3 * patch * patch)
    assert not rows[:, :leading].any()
    parts = rows[:, leading:].reshape(views, across, across, 3, patch, patch)
    return parts.transpose(0, 3, 1, 4, 2, 5).reshape(views, 3, across * patch, across * patch)


def test_llava(rng, read, monkeypatch):
    settings = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    processor = read(LLAVA, settings)
    resize_as_torchvision(monkeypatch)
    reference = CLIPImageProcessorPil(**settings)
    for size in [*SIZES, (57, 300), (301, 58)]:
        image = noise(rng, *size)
        found, = processor.process([EncodedFile(encoded(image))])
        expected = reference(images=[image], return_tensors="np")["pixel_values"]
        assert found.grid == (1, 4, 4) and found.tokens == 16
        assert found.order.tolist() == list(range(1, 17))
        np.testing.assert_allclose(views_of(found, 14), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(AllSparkError, match="has 20000 x 1 pixels: with 56 on the shorter side"):
        processor.process([EncodedFile(encoded(noise(rng, 20000, 1)))])


@pytest.mark.parametrize("settings", [
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 61, "width": 61}},
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 61, "width": 61}, "resample": 2,
     "image_mean": [0.4, 0.5, 0.6], "do_center_crop": False}])
def test_llava_with_siglip(rng, read, monkeypatch, settings):
    """The whole image becomes a square; the tower leaves out its last 5 rows and columns of pixels."""
    processor = read(SIGLIP, settings)
    resize_as_torchvision(monkeypatch)
    reference = SiglipImageProcessorPil(**settings)
    for size in [*SIZES, (20000, 1)]:
        image = noise(rng, *size)
        found, = processor.process([EncodedFile(encoded(image))])
        expected = reference(images=[image], return_tensors="np")["pixel_values"]
        assert expected.shape[2:] == (61, 61) and found.grid == (1, 4, 4) and found.order.tolist() == list(range(16))
        np.testing.assert_allclose(views_of(found, 14, 0), expected[:, :, :56, :56], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings, problem", [
    ({"size": {"shortest_edge": 61}}, "'size'.* is .*: the vision tower takes 61 x 61 pixels$"),
    ({"size": {"height": 61, "width": 60}}, "'size'.* is .*: the vision tower takes 61 x 61 pixels$"),
    ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 60}}, "pixels, of a shortest_edge of as"),
    ({"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 60, "width": 60}}, "'crop_size'.* is 60"),
    ({"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}, "do_center_crop'.* is false: only true"),
    ({"do_resize": False}, "do_resize'.* is false: only true"),
])
def test_settings_of_llava_that_are_refused(read, settings, problem):
    with pytest.raises(AllSparkError, match=problem):
        read(SIGLIP, settings)


@pytest.mark.parametrize("side, siglip", [(56, False), (61, True)])
def test_llava_next(rng, read, monkeypatch, side, siglip):
    """Tiles, and which rows of theirs a prompt has: as transformers unpads features of whole numbers."""
    pinpoints = [[side * down, side * across] for down, across in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 4))]
    settings = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side},
                "image_grid_pinpoints": pinpoints}
    model = {**(SIGLIP if siglip else LLAVA), "model_type": "llava_next", "image_grid_pinpoints": pinpoints}
    processor = read(model, settings)
    resize_as_torchvision(monkeypatch)
    reference = LlavaNextImageProcessorPil(**settings)
    counts = SimpleNamespace(image_processor=reference, patch_size=14, num_additional_image_tokens=int(not siglip))
    counts._get_unpadded_features = functools.partial(LlavaNextProcessor._get_unpadded_features, counts)
    for size in [*SIZES, (57, 300), (301, 58), (112, 112), (400, 401)]:
        image = noise(rng, *size)
        found, = processor.process([EncodedFile(encoded(image))])
        expected = reference(images=[image], return_tensors="np")
        views, leading = views_of(found, 14, int(not siglip)), int(not siglip)
        np.testing.assert_allclose(views, expected["pixel_values"][0][:, :, :56, :56], rtol=1e-6, atol=1e-6)
        wanted = LlavaNextProcessor._get_number_of_features(counts, *size[::-1], side, side)
        assert found.tokens == len(found.order) == wanted - leading
        features = torch.arange(len(views) * (16 + leading)).reshape(len(views), -1)[:, leading:, None]
        config = SimpleNamespace(image_grid_pinpoints=pinpoints,
                                 vision_config=SimpleNamespace(image_size=side, patch_size=14))
        packed, _ = LlavaNextModel.pack_image_features(SimpleNamespace(config=config), [features],
                                                       torch.tensor([size[::-1]]), "default", torch.tensor([-1]))
        assert packed[0][:, 0].tolist() == found.order.tolist()


def test_qwens_limits_of_pixels(rng, read):
    """An image's own limits override the checkpoint's, as transformers' `size` does; wrong ones are named."""
    processor = read(QWEN, {})
    assert processor.takes_pixels
    image = noise(rng, 300, 200)
    for least, most in [(100_000, 0), (0, 9000), (20_000, 30_000), (0, 3000), (500_000, 0)]:
        found, = processor.process([EncodedFile(encoded(image), least, most)])
        size = {"shortest_edge": min(least or 3136, most or 1 << 30), "longest_edge": most or 28 * 28 * 1280}
        expected = Qwen2VLImageProcessorPil(size=size)(images=[image], return_tensors="np")
        assert found.grid == tuple(expected["image_grid_thw"][0].tolist())
    for least, most, problem in [(-1, 0, "min_pixels=-1: allowed are 1 to"), (0, 1 << 30, "max_pixels=1073741824"),
                                 (9000, 8000, "min_pixels=9000, more than its max_pixels=8000")]:
        with pytest.raises(AllSparkError, match=f"image 2 of the request has {problem}"):
            processor.process([EncodedFile(encoded(image)), EncodedFile(encoded(image), least, most)])
    with pytest.raises(AllSparkError, match="image 1 of the request has 201 x 1 pixels: the longer side may have"):
        processor.process([EncodedFile(encoded(noise(rng, 201, 1)))])
    with pytest.raises(AllSparkError, match="image 2 of the request has 77 tokens, and only 76 are left"):
        processor.process([EncodedFile(encoded(image))] * 2, most_tokens=153)
    assert len(processor.process([EncodedFile(encoded(image))] * 2, most_tokens=154)) == 2


def test_digests(rng, read, tmp_path):
    """A digest stands for the file, the options and the settings."""
    first, second = (encoded(noise(rng, 9, 9)) for _ in range(2))
    processor, other = read(QWEN, {}), read(QWEN, {"max_pixels": 9999})
    files = [EncodedFile(first), EncodedFile(second), EncodedFile(first, 9), EncodedFile(first, 0, 9)]
    digests = [each.digest(file) for each in (processor, other) for file in files]
    assert len(set(digests)) == 8 and {len(digest) for digest in digests} == {16}
    assert processor.digest(EncodedFile(bytes(first))) == digests[0] == read(QWEN, {}).digest(EncodedFile(first))


@pytest.mark.parametrize("settings, problem", [
    ({"patch_size": 0}, "patch_size"), ({"patch_size": "x"}, "patch_size"), ({"size": {"longest_edge": -1}}, "size"),
    ({"min_pixels": 9, "max_pixels": 8}, "asks for 9 to 8 pixels"), ({"do_resize": False}, "do_resize"),
    ({"image_mean": [1, 2]}, "image_mean"), ({"image_std": [0, 1, 1]}, "image_std"), ({"resample": 9}, "resample"),
    ({"rescale_factor": 0}, "rescale_factor"),
])
def test_wrong_settings(read, settings, problem):
    with pytest.raises(AllSparkError, match=rf"preprocessor_config.json .*|{problem}") as caught:
        read(QWEN, settings)
    assert problem in str(caught.value)


def test_towers_of_another_size(read):
    for config, name in ((QWEN, "patch_size"), (QWEN, "spatial_merge_size"), (GEMMA4, "pooling_kernel_size")):
        with pytest.raises(AllSparkError, match=rf"vision_config.{name}' of .*config.json is 5, and that of the image"):
            read({**config, "vision_config": {name: 5}}, {})


def test_models_without_images(tmp_path):
    from allspark_server.images import read_processor
    assert read_processor(tmp_path, QWEN) is None                                  # no settings
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"patch_size": 16}, "x": 1}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert read_processor(tmp_path, QWEN).patch == 16                              # the newer file counts
    assert read_processor(tmp_path, {"model_type": "qwen2", "vision_config": {}}) is None
    assert read_processor(tmp_path, {**QWEN, "vision_config": None}) is None       # the text part alone


def test_expanding(rng, read):
    """Each placeholder becomes its image's ids; what is expanded stays; what does not fit is refused with numbers."""
    processor = read(QWEN, {})
    images = processor.process([EncodedFile(encoded(noise(rng, *size))) for size in [(28, 56), (90, 30)]])
    first, second = (each.tokens for each in images)
    assert first != second
    bare, whole = [1, 7, 2, 3, 7, 4], [1, *[7] * first, 2, 3, *[7] * second, 4]
    assert processor.expand(bare, images) == whole == processor.expand(whole, images)
    assert processor.expand((7, 7), images) == [7] * (first + second)
    assert processor.expand([1, 2], []) == [1, 2]
    for ids, given, numbers in [([1], images, "0 image placeholders (id 7) and the request 2 images"),
                                (bare, images[:1], "2 image placeholders (id 7) and the request 1 images"),
                                (bare, [], "2 image placeholders (id 7) and the request 0 images"),
                                (whole, images[::-1], f"{first + second} image placeholders (id 7)"),
                                ([1, *[7] * first, 2, 7], images, f"{first + 1} image placeholders")]:
        with pytest.raises(ValueError) as caught:
            processor.expand(ids, given)
        assert numbers in str(caught.value)


# ---- ids in prompts, against the texts that transformers makes and their tokens -------------------------------


def expanded(read, rng, tmp_path, config, settings, texts, replacement):
    """Checks prompts with two images; `replacement`: the text of an image's (rows, columns) of embedding rows."""
    tokenizer, processor = add_image_tokens(tmp_path), read(config, settings)
    images = processor.process([EncodedFile(encoded(noise(rng, *size))) for size in [(90, 120), (200, 60)]])
    named = tokenizer.id_to_token(processor.placeholder)
    for text in texts:
        parts = text.split("<image>")
        whole = parts[0]
        for part, image in zip(parts[1:], images):
            whole += replacement(*(length // processor.merge for length in image.grid[1:])) + part
        bare = tokenizer.encode(text.replace("<image>", named)).ids
        ids = tokenizer.encode(whole).ids
        given = images[:len(parts) - 1]
        assert processor.expand(bare, given) == ids == processor.expand(ids, given)
        assert ids.count(processor.token) == sum(image.tokens for image in given)
    swapped = [images[::-1]] if images[0].tokens != images[1].tokens else []
    for given in (images[:1], images * 2, *swapped):
        with pytest.raises(ValueError, match=f"request {len(given)} images"):
            processor.expand(processor.expand(bare, images), given)
    return processor, images


TEXTS = ["", "a", "<image>", "a<image>b<image>", "<image><image>", "\n<image>\n\nb\n<image>\n",
         "\n\n\n<image>\n<image>", "\n\n\na\n\n\n\n<image>a\n\n\n\n<image>" + "\n" * 9]


@pytest.mark.parametrize("config", [PIXTRAL, MISTRAL3])
def test_rows_of_pixtral(rng, read, tmp_path, config):
    def replacement(rows, columns):
        return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"

    expanded(read, rng, tmp_path, config, {}, TEXTS, replacement)


def test_begin_and_end_of_gemma4(rng, read, tmp_path):
    expanded(read, rng, tmp_path, GEMMA4, {}, TEXTS, lambda rows, columns: "[8]" + "[IMG]" * rows * columns + "[9]")


def test_empty_lines_of_gemma3(rng, read, tmp_path):
    """The tokenizer has tokens of up to 5 newlines, into which the empty lines around an image may go."""
    settings = {"size": {"height": 112, "width": 112}}
    processor, images = expanded(read, rng, tmp_path, GEMMA3, settings, TEXTS,
                                 lambda rows, columns: "\n\n[8]" + "[IMG]" * rows * columns + "[9]\n\n")
    newline = processor.newlines[0]
    kept = processor.expand([newline, newline, 1, 8, 2, newline, newline], images[:1])      # ids that a caller made
    assert kept[:2] == kept[-2:] == [newline, newline] and kept[3] == processor.newlines[1]
    with pytest.raises(ValueError, match=r"0 image placeholders \(id 8\) and the request 1 images"):
        processor.expand([1, 7], images[:1])


def test_tokenizers_without_the_tokens(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    for config, name in ((PIXTRAL, "IMG_BREAK"), (GEMMA3, "\\\\n")):
        with pytest.raises(AllSparkError, match=rf"has no token '\[?{name}\]?'"):
            processor_of(tmp_path, config, {"size": {"height": 112, "width": 112}})
