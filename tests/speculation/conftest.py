"""Lets the tests here import what lies beside them. Kernels are tested in Triton's interpreter, which must be asked for
before triton is imported.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # else the interpreter warns that it does not fuse
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")]
