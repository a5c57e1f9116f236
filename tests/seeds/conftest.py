"""The programs in ``demos/seeds`` find the files beside them, and so do their workers, who have the same search path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "demos" / "seeds"))
