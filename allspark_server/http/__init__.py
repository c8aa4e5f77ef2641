"""The HTTP server: OpenAI's API (and Anthropic's messages) in front of a pool of server groups.

A process of its own: it speaks to the groups as any client does and imports neither the engine nor the native library,
so that a server that stalls or dies never harms a step. It keeps no state: requests of one user may go to any of its
workers. An endpoint is a file: its wire form (pydantic models), what it asks of the pool, and how the answer is
written, at once or as server-sent events. `call.py` is what they all stand on, `app.py` lists them, `__main__.py` is
the process.
"""
