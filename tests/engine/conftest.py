from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a test imports one of Triton's kernels

# Helpers beside the tests; the import mode "importlib" adds no folder to the path.
sys.path.insert(0, str(Path(__file__).parent))
