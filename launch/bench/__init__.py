"""`allspark bench`: speeds, each beside the ceiling that this machine sets, measured in the same run.

`static.py` is the command of that name; `ceiling.py` what a model's shapes make of the machine's ceilings; `measure.py`
times one cell of the grid; `peers.py` runs the adapters of other engines; `report.py` makes tables, JSON and plots.
"""
from .static import add_static

__all__ = ["add_commands"]


def add_commands(command) -> None:
    """Adds `bench` to the parser. command(name, handler, summary, …) makes a subcommand of `allspark`."""
    p = command("bench", None, "measure speeds beside the machine's ceilings, and peers", epilog="""\
allspark bench static --help tells more; start with: allspark bench static --formats bfloat16 --rounds 1""")
    add_static(p.add_subparsers(dest="mode", required=True, metavar="MODE"))
