"""The examples are tested as they are: their folders can be imported from."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "flower-deploy"), str(EXAMPLES / "flower-app")]
