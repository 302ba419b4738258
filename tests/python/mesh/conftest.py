"""Makes this folder's helpers importable: tests run in importlib mode, which does not change sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
