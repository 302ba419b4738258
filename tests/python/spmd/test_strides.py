"""Local tensors that are views: functions give the same with any strides."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import P, on_mesh, part

import torch_overlap as to
from torch_overlap.mesh import from_local
from torch_overlap.mesh.value_spec import layout_of


def columns(x):
    """Returns x as every second column of a wider tensor."""
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def reversed_order(x):
    """Returns x with its first dimension contiguous."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def cropped(x):
    """Returns x as the end of a longer tensor: contiguous, not at the beginning of its memory."""
    return torch.cat((x[:1], x))[1:]


# Composite operators that select a kernel by strides, views that depend on strides, kernels that read raw memory.
FUNCTIONS = {
    "_weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), [(4, 6), (4, 1)]),
    "_weight_norm along the last dimension": (lambda v, g: torch._weight_norm(v, g, 1), [(4, 6), (1, 6)]),
    "_weight_norm of a column": (lambda v: torch._weight_norm(v, v[:, :1], 0), [(4, 6)]),
    "pdist": (F.pdist, [(4, 6)]),
    "cdist": (torch.cdist, [(4, 6), (8, 6)]),
    "cdist by products": (lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"), [(4, 6), (8, 6)]),
    "stft": (lambda x: torch.view_as_real(torch.stft(x, 4, 2, return_complex=True)), [(4, 16)]),
    "view as complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2j), [(4, 6, 2)]),
    "view as wider numbers": (lambda x: x.detach().view(torch.complex128).abs(), [(4, 6)]),
    "unfold": (lambda x: x.unfold(1, 3, 2), [(4, 6)]),
    "im2col": (lambda x: F.unfold(x, 2), [(2, 3, 4, 4)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [(2, 3, 4, 4)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), [(2, 3, 4, 4)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), [(2, 3, 4, 4)]),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), [(2, 3, 4, 4), (2, 3, 3, 2)]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [(2, 4, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 4, 4), (3, 2, 2, 2)]),
    "linalg.solve": (torch.linalg.solve, [(4, 4), (4, 2)]),
    "fft": (lambda x: torch.view_as_real(torch.fft.fft2(x)), [(4, 6)]),
}


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_do_not_depend_on_strides(name, seed):
    """Values and gradients, of whole and of sharded operands."""
    function, shapes = FUNCTIONS[name]

    def body(r):
        for make, spec in itertools.product((columns, reversed_order, cropped), (None, P("x"))):
            r.what = f"{make.__name__} {spec}"
            leaves = [r.randn(*shape).requires_grad_() for shape in shapes]
            operands = []
            for leaf in leaves:
                layout = layout_of(spec, r.mesh, leaf.dim())
                own = part(leaf.detach(), layout, r.mesh.rank)
                operands.append(from_local(make(own) if len(own) else own.clone(), r.mesh, layout, leaf.shape))
                operands[-1].requires_grad_()
                assert operands[-1].local.equal(own)
            expected, y = function(*leaves), function(*operands)
            r.check(y, expected)
            if not expected.requires_grad:
                continue
            expected.sum().backward()
            y.sum().backward()
            for leaf, operand in zip(leaves, operands, strict=True):
                r.check(operand.grad, leaf.grad)

    on_mesh("x=2", body, seed)


def test_memory_is_not_addressed_by_strides(seed):
    """as_strided of a view would depend on the memory made by the layout."""

    def body(r):
        x = from_local(r.randn(4, 6), r.mesh, None)
        for value in (x, x.t(), x[1:]):
            for function in (lambda v: v.as_strided((2, 2), (1, 3)), lambda v: torch.as_strided(v, (2, 2), (1, 3), 1),
                             lambda v: torch.as_strided_scatter(v, v[:2, :2], (2, 2), (1, 3)),
                             lambda v: torch.as_strided_copy(v, (2, 2), (1, 3))):  # fmt: skip
                with pytest.raises(to.UnsupportedError, match=r"as_strided.* has no strides. Call unfold, .*\.local"):
                    function(value)
            assert value.is_contiguous()
            assert value.stride() == torch.empty(value.shape, device="meta").stride()

    on_mesh("x=2", body, seed)
