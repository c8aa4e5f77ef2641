"""The engine: the stages that a request passes, its models, and the thread that runs the steps (engine.py)."""
