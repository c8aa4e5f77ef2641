"""Images in requests: decoded in processes with limits, resized, normalized and cut into patches without torch.

`read_processor` gives the `ImageProcessor` of a checkpoint. It makes an `ImageInput` of each image, and replaces each
placeholder of a prompt by the ids of its image. Nothing here knows requests, the scheduler or the vision tower.
"""

from .families import read_processor
from .processor import EncodedImage, ImageInput, ImageProcessor

__all__ = ["EncodedImage", "ImageInput", "ImageProcessor", "read_processor"]
