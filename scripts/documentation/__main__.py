"""`python -m documentation write | check`: what is generated and committed. scripts/docs runs it."""
from __future__ import annotations

import sys

from . import figures, pictures
from .paths import ROOT


def _check() -> int:
    wrong = [f"docs/architecture/{name}.svg" for name in pictures.differing()]
    text = (ROOT / "README.md").read_text()
    if figures.readme(text) != text:
        wrong.append("README.md")
    if wrong:
        print(f"not as the code and the results have it: {', '.join(wrong)}; scripts/docs --write writes them",
              file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        pictures.write()
        figures.write_readme()
    elif sys.argv[1:] == ["check"]:
        sys.exit(_check())
    else:
        sys.exit("python -m documentation write | check")
