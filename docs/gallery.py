"""The thumbnails of the how-to gallery: runs four demos and draws what they compute, ``python docs/gallery.py FOLDER``.

Sphinx runs this program when it builds the pages; nothing that is drawn here is kept in the repository.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of what draws

DEMOS = Path(__file__).resolve().parents[1] / "demos"
INK, FILL, TINT = "#7d8590", "#4477aa", "#ee8866"  # legible on light and on dark pages
STYLE = {"text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}


def bootstrap(found: dict[str, Any], axes: Any) -> None:
    axes.hist(found["found"], bins=80, color=FILL)
    axes.axvline(found["estimate"], color=TINT, label="of the 15 schools")
    axes.set(xlabel="correlation", yticks=[], title="Resampled correlations")
    axes.legend(frameon=False, loc="upper left")


def digits(found: dict[str, Any], axes: Any) -> None:
    images = found["pixels"][found["NUM_TRAIN"] :][:15]
    guesses = (found["cosine_features"](images) @ found["weights"]).argmax(axis=1)
    rows = [np.hstack([np.pad(image.reshape(8, 8), 1) for image in images[k : k + 5]]) for k in (0, 5, 10)]
    axes.imshow(np.vstack(rows), cmap="Blues")
    for k, guess in enumerate(guesses):
        axes.text(10 * (k % 5) + 8.5, 10 * (k // 5) + 8.5, str(guess), color=TINT, ha="center", va="center")
    axes.set(xticks=[], yticks=[], title="Digits as the model reads them")


def posterior(found: dict[str, Any], axes: Any) -> None:
    chain = found["parallel"].get_chain(discard=found["NUM_STEPS"] // 2, flat=True)
    axes.plot(chain[:, 1], chain[:, 3], ".", color=FILL, markersize=2, alpha=0.4, rasterized=True)
    axes.set(xlabel=found["names"][1], ylabel=found["names"][3], title="Posterior samples")


def halo(found: dict[str, Any], axes: Any) -> None:
    axes.imshow(found["expected"], cmap="inferno", interpolation="bilinear", aspect="auto")
    axes.set(xticks=[], yticks=[], title=f"A plate after {found['NUM_STEPS']} steps")


PICTURES: dict[str, tuple[str, list[str], Callable[[dict[str, Any], Any], None]]] = {
    "bootstrap": ("00_bootstrap.py", ["--size", "small"], bootstrap),
    "digits": ("10_digits_softmax.py", ["--size", "small"], digits),
    "posterior": ("12_mcmc.py", [], posterior),
    "halo": ("32_halo.py", ["--size", "small"], halo),
}


def draw_all(folder: Path) -> None:
    """Draw one picture of each demo, as ``NAME.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(DEMOS))
    for name, (demo, options, draw) in PICTURES.items():
        sys.argv = [demo, *options]
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = runpy.run_path(str(DEMOS / demo), run_name="__main__")
        with pyplot.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=(3.6, 2.6), layout="constrained")
            draw(found, axes)
            figure.savefig(folder / f"{name}.svg", transparent=True)
            pyplot.close(figure)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
