"""Fuzzing of everything that parses foreign data: step plans, wire messages, model files, bodies of HTTP requests.

    python -m fuzz --count 1000000                         all targets in turn, by their shares
    python -m fuzz --target plan --seed 7 --count 100000   one of them
    python -m fuzz --target plan --seed 7 --block 123      a block again, as a failure names it
    python -m fuzz --target http --count 1000000           bodies, to a worker of the HTTP server before a group
    tests/sanitize address --run -m fuzz --count 1000000   with AddressSanitizer and UndefinedBehaviorSanitizer

`mutate.py` changes bytes, JSON and protobuf messages; `plans.py`, `wire.py`, `files.py`, `text.py` and `bodies.py`
hold the targets, each of which makes its inputs from a seed and says which errors are allowed; `__main__.py` counts,
and watches time and memory.
"""
