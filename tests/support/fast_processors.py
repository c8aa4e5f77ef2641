"""Runs image processors of transformers on torchvision, in a Python that has it: fast_processors.py FOLDER.

FOLDER has images.npz (uint8 [height, width, 3] each, of videos [frames, height, width, 3]) and cases.json, a list of
[name of a class, settings]; the results go to results.npz as CASE_IMAGE_KEY, or CASE_IMAGE_error if the processor
refuses the image.
"""

import json
import sys
from pathlib import Path

import numpy as np
import transformers
from PIL import Image


def main(folder: Path) -> None:
    images = np.load(folder / "images.npz")
    results = {}
    for number, (name, settings) in enumerate(json.loads((folder / "cases.json").read_text())):
        processor = getattr(transformers, name)(**settings)
        films = "Video" in name
        assert films or processor.backend == "torchvision", processor.backend
        for key in images:
            if films != (images[key].ndim == 4):
                continue
            try:
                found = (processor(videos=[images[key]], do_sample_frames=False, return_tensors="np") if films else
                         processor(images=[Image.fromarray(images[key])], return_tensors="np"))
            except (ValueError, RuntimeError) as error:
                found = {"error": np.array(str(error))}
            results.update({f"{number}_{key}_{each}": np.asarray(value) for each, value in found.items()})
    np.savez(folder / "results.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
