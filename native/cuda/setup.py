"""Builds the CUDA backend alone, by the setup.py of the whole tree."""
import os
import runpy
from pathlib import Path

os.environ |= {"ALLSPARK_DISTRIBUTION": "cuda", "ALLSPARK_CUDA": "1"}
os.chdir(Path(__file__).resolve().parents[2])
runpy.run_path("setup.py", run_name="__main__")
