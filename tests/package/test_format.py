"""Native code is formatted as .clang-format says, by the version that the test requirements name."""

import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def test_native_code_is_formatted():
    """To mend a failure, run `clang-format -i` on the files that it names."""
    beside = shutil.which("clang-format", path=str(Path(sys.executable).parent))
    assert beside, "clang-format is a test requirement: pip install '.[test]'"
    sources = sorted(str(p.relative_to(ROOT)) for kind in ("*.h", "*.cpp") for p in (ROOT / "native").rglob(kind))
    assert len(sources) > 50
    done = subprocess.run([beside, "--dry-run", "--Werror", *sources], cwd=ROOT, capture_output=True, text=True)
    wrong = sorted({line.split(":")[0] for line in done.stderr.splitlines() if "error:" in line})
    assert done.returncode == 0, f"not formatted: {', '.join(wrong)}"
