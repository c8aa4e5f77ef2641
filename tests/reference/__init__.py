"""The reference backend: programs computed in NumPy, in float64, one row after the other; and tests of it.

Same contract as a backend: `compile(programs, weights, limits)`, `runner.step(plan)`. It reads plans by itself
(plan.py), keeps slots and spans as ranks do (batch.py), and has every op of the table (ops.py) and every way to store
weights (encodings.py). What it computes is compared with formulas and libraries in this folder; every backend is
compared with it.
"""
