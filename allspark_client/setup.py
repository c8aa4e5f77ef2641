"""Builds the client alone, by the setup.py of the whole tree."""
import os
import runpy
from pathlib import Path

os.environ["ALLSPARK_DISTRIBUTION"] = "client"
os.chdir(Path(__file__).resolve().parents[1])
runpy.run_path("setup.py", run_name="__main__")
