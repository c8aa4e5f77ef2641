"""The version of client and server (one source tree, one number)."""

__version__ = "0.1.0"
