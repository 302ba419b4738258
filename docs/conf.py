"""Configuration of the documentation site: `make site` builds it into build/site."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "extensions")]

import torch_overlap  # noqa: E402

project = "torch_overlap"
author = "The torch_overlap authors"
project_copyright = author
release = version = torch_overlap.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference_pages",
]
exclude_patterns = ["extensions"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# A docstring uses single backticks for code, as the pages do.
default_role = "code"
smartquotes = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "torch_overlap"
html_show_sourcelink = False
html_copy_source = False
