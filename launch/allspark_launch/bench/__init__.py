"""`allspark bench`: speeds, each beside this machine's roofline, which is measured in the same run.

`static.py` and `serving.py` are the modes of those names. static uses `roofline.py` (the highest speed that a model's
shapes allow on the machine), `measure.py` (times one cell of the grid), `peers.py` (runs the adapters of other
engines), `results.py` and `report.py` (tables, JSON and plots). serving uses `workload.py` (what is requested),
`targets.py` (the servers under test), `load.py` (how requests are sent) and `latencies.py` (the figures). `layouts.py`
uses the latter to find the best layout of a pool's groups.
"""
from ..commands import AddCommand
from .serving import add_serving
from .static import add_static

__all__ = ["add_command"]


def add_command(command: AddCommand) -> None:
    """Adds `bench` and its modes to the parser."""
    p = command("bench", None, "measure speeds beside the machine's roofline, or under load; also of other engines",
                epilog="""\
allspark bench static --help and allspark bench serving --help explain more; start with:
  allspark bench static --formats bfloat16 --rounds 1
  allspark bench serving""")
    modes = p.add_subparsers(dest="mode", required=True, metavar="MODE")
    add_static(modes)
    add_serving(modes)
