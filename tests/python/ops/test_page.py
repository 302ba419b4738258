"""docs/reference/operators.md agrees with the schemas."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_what_the_schemas_generate():
    spec = importlib.util.spec_from_file_location("gen_ops_doc", ROOT / "scripts" / "gen_ops_doc.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = ROOT / "docs" / "reference" / "operators.md"
    assert page.read_text() == generator.page(), "run python scripts/gen_ops_doc.py"
