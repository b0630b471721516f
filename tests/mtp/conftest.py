from __future__ import annotations

import sys
from pathlib import Path

# Helpers beside the tests, and the engine tests' tiny models; the import mode "importlib" adds no folder to the path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]
