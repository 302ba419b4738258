"""Products with partial results, their uses, and the values of these."""

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import P, on_mesh

# Meshes, the layouts of x [m, k] and w [n, k], and that of the product.
PRODUCTS = {
    "one axis": ("tp=2", "[],[tp]", "[],[tp]", "[],[] P{tp}"),
    "two axes": ("dp=2,tp=2", "[],[dp,tp]", "[],[dp,tp]", "[],[] P{dp,tp}"),
    "rows on another axis": ("dp=2,tp=2", "[dp],[tp]", "[],[tp]", "[dp],[] P{tp}"),
}
products = pytest.mark.parametrize("product", PRODUCTS)
both = pytest.mark.parametrize("how", ["auto", "sequential"])


class Product:
    """y = x w^T, or with a bias, with a partial result; `expected` is its value."""

    def __init__(self, r, product="one axis", bias=False, grad=False):
        _, left, right, after = PRODUCTS[product]
        self.whole = [r.randn(8, 12), r.randn(4, 12), *([r.randn(4)] if bias else [])]
        self.operands = [r.place(t, at) for t, at in zip(self.whole, (left, right, None), strict=False)]
        for operand in self.operands if grad else ():
            operand.requires_grad_()
        self.y = F.linear(*self.operands)
        assert str(self.y.layout) == after
        self.expected = F.linear(*self.whole)
        self.num_terms = r.mesh.mesh.size // (2 if product == "rows on another axis" else 1)


def run(product, body, seed, *args):
    return on_mesh(PRODUCTS[product][0], body, seed, *args)


NEEDED = {
    "full": lambda y: y.full(),
    "scattered": lambda y: y.reshard(P("tp")).full(),
    "function": lambda y: torch.sin(y).full(),
    "linear function": lambda y: (y * 2.5).full(),
    "twice": lambda y: (y.reshard(P("tp")) + y).full(),
}
FUNCTIONS = {"function": torch.sin, "linear function": lambda v: v * 2.5, "twice": lambda v: v + v}


def check_uses(y, expected, *names):
    for name in names or NEEDED:
        torch.testing.assert_close(NEEDED[name](y), FUNCTIONS.get(name, lambda v: v)(expected))
