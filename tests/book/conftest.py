"""Lets the tests here import what lies beside them."""

import os
import sys
from pathlib import Path

# Before anything imports triton: a kernel that chapters run is interpreted.
os.environ.update(TRITON_INTERPRET="1", TRITON_DEFAULT_FP_FUSION="1")

sys.path.insert(0, str(Path(__file__).parent))
