"""Helper modules of this folder can be imported by its tests, also on rank processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
