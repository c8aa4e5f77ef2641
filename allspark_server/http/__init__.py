"""The HTTP server: OpenAI's API (and Anthropic's messages) in front of a pool of server groups.

It runs in processes of its own, which talk to the groups as any client does and import neither the engine nor the
native library: a process that stalls or crashes never delays a step. It keeps no state but in the store, if it has
one: requests of one user may go to any of its workers.

Each endpoint has a file: its wire form (pydantic models, in `*_wire.py` where they are many), its request to the pool,
and how the answer is written, at once or as server-sent events. `call.py` has what endpoints share, `app.py` lists
them, `__main__.py` is the process.
"""
