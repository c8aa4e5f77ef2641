"""Checks that an installed client can be used, on any system: all its modules, and the errors where nobody serves."""

import importlib
import pkgutil

import allspark_client
from allspark_client import AllSparkError, ClientEngine, pool


def main() -> None:
    for found in pkgutil.iter_modules(allspark_client.__path__):
        if found.name != "setup":       # of the source tree
            importlib.import_module(f"allspark_client.{found.name}")
    pool._FIRST_CONTACT_SECONDS = 0.2
    for arguments, told in (((), "the launcher is not installed"), (("127.0.0.1:9",), "127.0.0.1:9 cannot be reached")):
        try:
            ClientEngine(*arguments, reconnect_timeout=0)
        except AllSparkError as error:
            assert told in str(error), error
        else:
            raise AssertionError(f"no error that says {told!r}")


if __name__ == "__main__":
    main()
