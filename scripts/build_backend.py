"""setuptools' build backend, which also tells setup.py of editable installations and brings a CUDA compiler."""
import os
import runpy

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_wheel,
)

__all__ = ["build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable",
           "get_requires_for_build_sdist", "get_requires_for_build_wheel", "prepare_metadata_for_build_editable",
           "prepare_metadata_for_build_wheel"]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """NVIDIA's wheels, if ALLSPARK_CUDA=1 insists on the CUDA backend and there is no compiler for it."""
    requires = build_meta.get_requires_for_build_wheel(config_settings)
    if os.environ.get("ALLSPARK_CUDA") == "1":
        setup = runpy.run_path("setup.py")
        if setup["find_nvcc"]()[0] is None:
            requires += setup["nvcc_wheels"]()
    return requires


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None) -> str:
    """The metadata of the whole tree in one distribution."""
    os.environ["ALLSPARK_EDITABLE"] = "1"
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    """The whole tree in one distribution."""
    os.environ["ALLSPARK_EDITABLE"] = "1"
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
