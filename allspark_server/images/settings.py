"""Settings of Hugging Face image processors: preprocessor_config.json, or image_processor in processor_config.json."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspark_client.errors import AllSparkError, AsStatus

from ..models.fields import Fields
from ..tokenizer import vocabularies
from ..weights.files import parse_json, read_json
from .processor import Normalization

# Values that several processors of transformers have by default (its image_utils.py).
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers

_FILES = (("processor_config.json", "image_processor"), ("preprocessor_config.json", ""))
_VIDEO_FILES = (("processor_config.json", "video_processor"), ("video_preprocessor_config.json", ""))
SETTINGS_FILES = sorted({name for name, _ in (*_FILES, *_VIDEO_FILES)})


@dataclass(frozen=True)
class Settings:
    """Typed access to the settings; errors name the field and the file."""

    fields: Fields

    def number(self, name: str, default: int) -> int:
        """A positive number, or the side of a square as {"height": …, "width": …}."""
        value = self.fields.values.get(name)
        if isinstance(value, dict):
            sides = [self.fields.inner(name).need_positive(side, most=1 << 12) for side in ("height", "width")]
            if sides[0] != sides[1]:
                raise self.fields.error(name, f"is {value!r}: expected a square")
            return sides[0]
        return default if value is None else self.fields.need_positive(name, most=1 << 12)

    def size(self, default: dict[str, int]) -> dict[str, int]:
        """The size that images are resized to, with the keys that its kind has."""
        fields = self.fields.inner("size", default)
        return {name: fields.need_positive(name, most=1 << 30) for name in fields.values
                if fields.values[name] is not None}

    def resample(self, default: int) -> int:
        """The filter of resizing, by its number in Pillow."""
        value = self.fields.get("resample", int, default)
        if value not in (LANCZOS, BILINEAR, BICUBIC):
            raise self.fields.error("resample", f"is {value}: supported are {LANCZOS} (Lanczos), {BILINEAR} (bilinear) "
                                                f"and {BICUBIC} (bicubic)")
        return value

    def normalization(self, mean: Sequence[float], std: Sequence[float], normalizes: bool = True) -> Normalization:
        """How pixels become numbers. `mean`, `std`, `normalizes`: the processor's defaults."""
        factor = 1.0
        if self.fields.get("do_rescale", bool, True):
            factor = self.fields.get("rescale_factor", float, 1 / 255)
            if not factor > 0:
                raise self.fields.error("rescale_factor", f"is {factor}: it must be positive")
        if not self.fields.get("do_normalize", bool, normalizes):
            return Normalization(factor)
        means, stds = self._colors("image_mean", mean), self._colors("image_std", std)
        if min(stds) <= 0:
            raise self.fields.error("image_std", f"is {list(stds)}: the numbers must be positive")
        return Normalization(factor, means, stds)

    def _colors(self, name: str, default: Sequence[float]) -> tuple[float, float, float]:
        values = self.fields.get(name, list, list(default))
        if len(values) != 3 or not all(isinstance(value, (int, float)) and abs(value) < 1e6 for value in values):
            raise self.fields.error(name, f"is {values!r}: expected three numbers, for R, G and B")
        return float(values[0]), float(values[1]), float(values[2])

    def refuse(self, **switches: bool) -> None:
        """AllSparkError for a switch that is not at its only supported value, which is also its default."""
        for name, value in switches.items():
            if self.fields.get(name, bool, value) is not value:
                raise self.fields.error(name, f"is {str(not value).lower()}: only {str(value).lower()} is supported")


def check_tower(config: Fields, **values: int) -> None:
    """AllSparkError if vision_config has another value of a field than the image processor."""
    tower = config.inner("vision_config")
    for name, value in values.items():
        if tower.get(name, int, value) != value:
            raise tower.error(name, f"is {tower.values[name]}, and that of the image processor {value}")


def read_settings(directory: str | Path) -> Settings | None:
    """The settings of a checkpoint; None if it has no image processor."""
    return _read(directory, _FILES)


def read_video_settings(directory: str | Path) -> Settings | None:
    """The settings of videos; None if the checkpoint has none of their own."""
    return _read(directory, _VIDEO_FILES)


def _read(directory: str | Path, files: Sequence[tuple[str, str]]) -> Settings | None:
    for name, key in files:
        path = Path(directory, name)
        if not os.path.lexists(path):
            continue
        values: dict[str, Any] = read_json(path)
        if not key:
            return Settings(Fields(values, path))
        if key in values:
            return Settings(Fields(values, path).inner(key))
    return None


def tokens_of(directory: Path) -> dict[str, int]:
    """The ids of the tokens that a tokenizer finds in text before all others, special ones among them."""
    try:
        listed = parse_json(vocabularies.tokenizer_json(directory)).get("added_tokens") or []
        return {token["content"]: token["id"] for token in listed}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"the tokenizer in {directory} has no list of added_tokens: {error!r}") from error


def token_ids(directory: Path, names: Sequence[str]) -> list[int]:
    """The ids of special tokens. AllSparkError if the tokenizer lacks one."""
    tokens = tokens_of(directory)
    for name in names:
        if name not in tokens:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"the tokenizer in {directory} has no token {name!r}, which images of this model need")
    return [tokens[name] for name in names]
