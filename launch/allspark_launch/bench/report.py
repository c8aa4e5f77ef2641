"""A run as tables and as plots."""
from __future__ import annotations

from pathlib import Path

from .measure import Cell
from .results import Row, Run

COLUMNS = 4         # cells side by side in a table
TITLES = {"decode": "decode, tokens/s", "prefill": "prefill, tokens/s to the last first token"}


def cells_of(run: Run, kind: str) -> list[Cell]:
    """The cells of a table. Prefill does not depend on the output's length, so the first such cell stands for all."""
    if kind == "decode":
        return [cell for cell in run.cells if any(cell in row.decode for row in run.rows)]
    cells: dict[tuple[int, int], Cell] = {}
    for cell in run.cells:
        cells.setdefault((cell.batch, cell.prompt), cell)
    return list(cells.values())


def title_of(kind: str, cell: Cell) -> str:
    """The title of a cell's column."""
    return f"{cell.batch} x {cell.prompt}" + (f" + {cell.output}" if kind == "decode" else "")


def tables(run: Run) -> str:
    """Decode and prefill, a row for each engine and format, a column for each cell: the best round, the median, and the
    best round's part of the roofline around it (m: set by memory, c: by arithmetic).
    """
    best, median = run.best_machine(), run.median_machine()
    tiles = f"{best.bf16 / 1e9:.1f} Gop/s bfloat16 tiles ({median.bf16 / 1e9:.1f}), " if best.bf16 else ""
    lines = [f"roofline: {best.read / 1e9:.1f} GB/s read ({median.read / 1e9:.1f}), {best.fp32 / 1e9:.1f} Gop/s fp32 "
             f"({median.fp32 / 1e9:.1f}), {tiles}{best.int8 / 1e9:.1f} Gop/s int8 ({median.int8 / 1e9:.1f}); best of "
             f"{len(run.rooflines)} measurements (median); parts are of the roofline around each figure"]
    width = max([len(row.name) for row in run.rows] + [len("batch x prompt + output")])
    for kind in TITLES:
        cells = cells_of(run, kind)
        for start in range(0, len(cells), COLUMNS):
            part = cells[start:start + COLUMNS]
            lines += ["", f"{TITLES[kind]}: best (median), part of the roofline set by m: memory, c: arithmetic",
                      f"{'batch x prompt + output':<{width}}" + "".join(f"{title_of(kind, c):>30}" for c in part)]
            lines += [_line(run, kind, row, part, width) for row in run.rows if row.status == "measured"]
    missing = [row for row in run.rows if row.status != "measured"]
    if missing:
        lines += ["", *(f"{row.name:<{width}}  {row.status}" + (f": {row.reason}" if row.status == "failed" else "")
                        for row in missing)]
    return "\n".join(lines)


def _line(run: Run, kind: str, row: Row, cells: list[Cell], width: int) -> str:
    text = f"{row.name:<{width}}"
    for cell in cells:
        figure = run.figure(kind, row, cell)
        if figure is None:
            text += f"{'-':>30}"
        else:
            share = f"{100 * figure['fraction']:.0f} % {figure['bound_by'][0]}"
            text += f"{figure['best']:>11.1f} {'(' + format(figure['median'], '.1f') + ')':>10}{share:>8}"
    return text


def plot(run: Run, path: Path) -> bool:
    """Plots a bar for each cell and engine, and its roofline as a line, decode above prefill. `path`: a file of a
    format of matplotlib (.png, .svg, .pdf). False if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows = [row for row in run.rows if row.status == "measured"]
    kinds = [kind for kind in TITLES if cells_of(run, kind)]
    figure, axes = pyplot.subplots(len(kinds), 1, figsize=(10, 4 * len(kinds)), squeeze=False, layout="constrained")
    for axis, kind in zip(axes[:, 0], kinds):
        cells = cells_of(run, kind)
        width = 0.8 / max(1, len(rows))
        for i, row in enumerate(rows):
            figures = [(x, run.figure(kind, row, cell)) for x, cell in enumerate(cells)]
            places = [(x + (i - (len(rows) - 1) / 2) * width, f) for x, f in figures if f is not None]
            axis.bar([x for x, _ in places], [f["best"] for _, f in places], 0.9 * width, label=row.name)
            axis.hlines([f["ceiling"] for _, f in places], [x - width / 2 for x, _ in places],
                        [x + width / 2 for x, _ in places], colors="black", linewidth=1)
        axis.set_xticks(range(len(cells)), [title_of(kind, cell) for cell in cells])
        axis.set_title(TITLES[kind] + " (best; line: roofline)")
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(f"{Path(run.settings['model']).name}, {run.machine['threads']} threads, {run.machine['isa']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
