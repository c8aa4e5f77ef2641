"""Starts and looks after server groups: what the machine has, the mpirun line it implies, the supervisor, the
`allspark` command. Installed as `allspark_launch`.

Not here: what a rank does once it runs (`allspark_server/__main__.py`), and the engine itself.
"""
