"""Pools: groups that run as systemd services, from one pool.toml."""
