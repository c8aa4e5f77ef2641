"""The `allspark` command, also as `python -m allspark_launch`."""
from __future__ import annotations

import sys


def main() -> int:
    """Runs the command; returns its exit status. Ctrl-C ends it quietly, also while it is imported."""
    try:
        from . import cli
        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
