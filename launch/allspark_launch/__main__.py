"""`python -m allspark_launch` is the `allspark` command."""
import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
