"""The files in ``demos/seeds`` find each other, on workers too, which have the same search path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "demos" / "seeds"))
