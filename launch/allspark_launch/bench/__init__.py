"""`allspark bench`: speeds, each beside the ceiling that this machine sets, measured in the same run.

`static.py` and `serving.py` are the commands of those names. Of static, `ceiling.py` is what a model's shapes make of the
machine's ceilings; `measure.py` times one cell of the grid; `peers.py` runs the adapters of other engines; `report.py`
makes tables, JSON and plots. Of serving, `workload.py` is what is asked for, `targets.py` who is asked, `load.py` how,
and `latencies.py` what came of it; `layouts.py` measures with these how a pool's groups use the machine best.
"""
from ..commands import AddCommand
from .serving import add_serving
from .static import add_static

__all__ = ["add_command"]


def add_command(command: AddCommand) -> None:
    """Adds `bench` to the parser. command(name, handler, summary, …) makes a subcommand of `allspark`."""
    p = command("bench", None, "measure speeds: beside the machine's ceilings, or under load; and peers", epilog="""\
allspark bench static --help and allspark bench serving --help tell more; start with:
  allspark bench static --formats bfloat16 --rounds 1
  allspark bench serving""")
    modes = p.add_subparsers(dest="mode", required=True, metavar="MODE")
    add_static(modes)
    add_serving(modes)
