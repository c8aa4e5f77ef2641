"""Pools: groups that run as systemd services, described by one pool.toml."""
