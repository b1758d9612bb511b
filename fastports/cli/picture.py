"""What ``fastports map`` knows, as a picture in a file."""

from __future__ import annotations

from .say import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["draw"]

# Okabe and Ito's colours, which people of every colour vision tell apart, on two pale grounds.
_COLOURS = {
    "free": "#f0f0f0",
    "ephemeral": "#cfe3f2",
    "held through fastports": "#0072b2",
    "recorded, not held": "#009e73",
    "taken by others": "#d55e00",
    "reserved": "#f0e442",
    "privileged": "#cc79a7",
    "denied": "#000000",
}
_MARGIN = 1.1  # inches around the field, for the numbers and the legend
_WIDTH = 8.0
_DENSE = 2500  # cells; below that each has a frame of its own


def draw(
    path: str,
    form: str,
    title: str,
    rows: Sequence[tuple[int, str]],
    each: int,
    legend: Mapping[str, str],
    counts: Mapping[str, int],
    blocks: Iterable[tuple[int, int, str]],
) -> None:
    """Write a picture.

    Parameters
    ----------
    path
        The file.
    form
        ``"svg"`` or ``"png"``.
    title
        What stands above it.
    rows
        First port of each row and its cells, a letter each; blank where there is no port.
    each
        Ports in a cell.
    legend
        What the letters mean.
    counts
        Ports by letter; letters without ports stay out of the legend.
    blocks
        First and last port, and the name to write there if there is room.
    """
    try:
        import matplotlib  # 230 ms with what follows

        matplotlib.use("agg")  # no window, whatever the environment says
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as exc:
        raise Failure(
            f"a picture needs matplotlib ({exc}). Type: pip install 'fastports[plot]'."
        ) from exc
    from io import BytesIO

    import numpy as np

    letters = list(legend)
    field = np.full((len(rows), len(rows[0][1])), np.nan)
    for y, (_, cells) in enumerate(rows):
        for x, letter in enumerate(cells):
            if letter != " ":
                field[y, x] = letters.index(letter.lower())
    height, across = field.shape
    cell = (_WIDTH - _MARGIN) / max(across, 20)  # inches
    inches = cell * height
    figure = Figure(
        figsize=(cell * across + _MARGIN, inches + _MARGIN), dpi=100, layout="constrained"
    )
    axes = figure.add_subplot()
    axes.imshow(
        field,
        cmap=ListedColormap([_COLOURS[legend[letter]] for letter in letters]),
        vmin=-0.5,
        vmax=len(letters) - 0.5,
        interpolation="nearest",
    )
    axes.set_title(title, loc="left", fontsize=11)
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * cell >= 0.14 or n == 100)
    axes.set_yticks(range(0, height, step), [str(rows[y][0]) for y in range(0, height, step)])
    tenth = max(across // 10, 1)
    axes.set_xticks(range(0, across, tenth), [f"+{x * each}" for x in range(0, across, tenth)])
    axes.tick_params(labelsize=8, length=2)
    axes.set_ylabel("first port of the row", fontsize=8)
    if field.size <= _DENSE:
        axes.set_xticks(np.arange(across + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(height + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    size = min(cell * 72 * 0.95, 9.0)  # points: as high as a row
    for first, last, name in blocks:
        y, x = divmod((first - rows[0][0]) // each, across)
        room = min((last - first + 1) // each, across - x)
        if name and 0 <= y < height and len(name) * size * 0.62 < room * cell * 72:
            axes.text(
                x - 0.5 + room / 2, y, name, size=size, color="white", ha="center",
                va="center_baseline", parse_math=False, zorder=3,
            )  # fmt: skip
    figure.legend(
        handles=[
            Patch(facecolor=_COLOURS[name], edgecolor="#808080", linewidth=0.5, label=label)
            for letter, name in legend.items()
            if counts[letter]
            for label in (f"{name}: {counts[letter]:,}",)
        ],
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    image = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastports"}):
        # without a date: the same ports, the same bytes
        figure.savefig(
            image,
            format=form,
            bbox_inches="tight",
            metadata={"Date": None} if form == "svg" else None,
        )
    with open(path, "wb") as file:
        file.write(image.getvalue())
