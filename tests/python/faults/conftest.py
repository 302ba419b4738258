"""The modules of this folder that are no tests can be imported by those that are, also on rank processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
