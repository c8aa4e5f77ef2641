"""Checks that an installed wheel is complete. cibuildwheel runs it after each build, outside of the source tree."""

import platform
import runpy
import subprocess
import sys
from pathlib import Path

import allspark_client
import allspark_server
from allspark_launch.group.background import shipped_model

SETUP = runpy.run_path(str(Path(__file__).resolve().parents[2] / "setup.py"))


def main() -> None:
    library = next(Path(allspark_server.__file__).parent.glob("_native*.so")).read_bytes()
    wanted = SETUP["ISAS"][platform.machine()]
    # A kernel's mangled name has the instruction set's namespace: its length, then the name.
    missing = [name for name in wanted if f"{len(name)}{name}".encode() not in library]
    assert not missing, f"the library has no kernels for {', '.join(missing)}"
    assert allspark_client.__version__ == SETUP["VERSION"]
    assert shipped_model().is_dir()
    findings = subprocess.run([sys.executable, "-m", "allspark_launch", "doctor"], capture_output=True, text=True)
    assert findings.returncode == 0, findings.stdout + findings.stderr
    print(f"all of {', '.join(wanted)}")


if __name__ == "__main__":
    main()
