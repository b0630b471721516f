from __future__ import annotations

import sys
from pathlib import Path

# Helpers beside the tests; the import mode "importlib" adds no folder to the path.
sys.path.insert(0, str(Path(__file__).parent))
