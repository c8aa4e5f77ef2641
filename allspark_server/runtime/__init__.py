"""Runs a step: the plan, the group of ranks that executes it, and each rank's model runner.

`plan` describes what a step computes, `group` sends it to every rank, and `runner` passes it to the native executor.
This package knows nothing of requests: the scheduler decides what a step contains.
"""
