"""calibrate measures a valid model, the same on every rank, with which plans are made."""

from __future__ import annotations

import pytest

from torch_overlap import InvalidValueError
from torch_overlap.mesh import CostModel, Layout, Mesh, calibrate, connect, load_cost_model, plan_reshard
from torch_overlap.mesh.calibrate import COLLECTIVES
from torch_overlap.testing import run_ranks


def rounded(value):
    """Nine digits: a file has microseconds, a model seconds."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def check(comm, path):
    mesh = connect({"a": 2, "b": 2}, comm)
    with pytest.raises(InvalidValueError, match="expected two or more rising sizes of at least 8 bytes, got"):
        calibrate(mesh, sizes=(1024, 512))
    model = calibrate(mesh, path, name="here", sizes=(1024, 65536), rounds=2)
    mesh.close()
    return model.to_dict()


def test_a_measured_model_is_the_same_on_all_ranks_and_in_its_file(tmp_path):
    file = tmp_path / "cost.json"
    first, *others = run_ranks(check, 4, str(file), timeout=240)
    assert all(other == first for other in others)
    model = load_cost_model(file)
    assert rounded(model.to_dict()) == rounded(first)
    assert model.name == "here"
    assert set(first["links"]) == set(CostModel.h200().to_dict()["links"])
    curves = first["links"]["nvlink"]["curves"]
    assert [curve["collective"] for curve in curves] == list(COLLECTIVES)
    for curve in curves:
        assert curve["ranks"] == 2
        (small, quick), (large, slow) = curve["bytes_us"]
        assert (small, large) == (1024, 65536)
        assert 0 < quick < slow
    assert all(value > 0 for value in first["device"]["tflops"].values())
    source, target = (Layout.parse(Mesh({"a": 2, "b": 2}), text) for text in ("[a],[]", "[],[a]"))
    assert plan_reshard(source, target, (64, 64), 4, model).seconds > 0
