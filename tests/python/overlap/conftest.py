"""Adds this folder to the path: rank processes import overlap_cases too."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
