"""What runs a step: the plan, the group of ranks that executes it, and each rank's model runner.

`plan` says what is to be computed, `group` hands it to every rank, `runner` gives it to the native executor. Nothing
here knows requests; the scheduler decides.
"""
