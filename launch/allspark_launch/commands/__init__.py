"""Subcommands of `allspark` that are programs of their own."""
