"""Functions of images: pooling, interpolation, padding by pixels."""

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import compare, on_mesh

IMAGES = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2, stride=1, padding=1),
    "max_pool2d with indices": lambda x: F.max_pool2d(x, 3, return_indices=True)[0],
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (4, 1)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 4),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest-exact": lambda x: F.interpolate(x, (5, 3), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, (9, 1), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, (9, 7), mode="bicubic", antialias=True),
    "reflect": lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_stay_where_they_are(name, seed):
    """Pooling, interpolation and padding of batches and channels that are sharded send nothing."""

    def body(r):
        for layout in ("[dp],[tp],[],[]", "[dp,tp],[],[],[]", "[],[tp,dp],[],[]"):
            compare(r, IMAGES[name], [r.randn(3, 6, 6, 8)], [layout], [], layout)
        compare(r, IMAGES[name], [r.randn(3, 6, 6, 8)], ["[],[dp],[tp],[]"])
        for shape, layout in (((3, 3, 6, 8), "[],[dp,tp],[],[]"), ((2, 3, 6, 8), "[dp,tp],[],[],[]")):
            compare(r, IMAGES[name], [r.randn(*shape)], [layout], [], layout)  # ranks without any image

    on_mesh("dp=2,tp=2", body, seed)


VOLUMES = {f"{mode} {n}d": (mode, n) for mode in ("nearest", "nearest-exact") for n in (1, 3)}


@pytest.mark.parametrize("name", [*IMAGES, *VOLUMES])
def test_a_batch_without_images(name, seed):
    """The result has no images either, and the gradient too, where torch computes both."""

    def body(r):
        mode, n = VOLUMES.get(name, ("", 2))
        function = IMAGES.get(name, lambda x: F.interpolate(x, scale_factor=2, mode=mode))
        layout = "[dp],[tp]" + ",[]" * n
        compare(r, function, [r.randn(0, 4, *(6,) * n)], [layout], [], layout)

    on_mesh("dp=2,tp=2", body, seed)


def test_images_without_channels_are_refused(seed):
    def body(r):
        with pytest.raises(RuntimeError, match=r"expected x \[batch, channels, pixels...\] with channels"):
            F.interpolate(r.place(r.randn(2, 0, 4, 4), "[dp],[tp],[],[]"), scale_factor=2)

    on_mesh("dp=2,tp=2", body, seed)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("layout", ["[dp],[tp],[],[]", "[],[],[dp],[tp]"])
def test_interpolated_bytes_are_those_of_torchs_kernel(mode, layout, seed):
    """torch's decomposition of interpolate into Python operators rounds bytes otherwise than its kernel."""

    def body(r):
        x = r.randint(256, 4, 4, 6, 10).to(torch.uint8)
        for to in ({"size": (9, 7)}, {"scale_factor": (0.5, 1.7)}):
            out = F.interpolate(r.place(x, layout), mode=mode, **to)
            r.check(out, F.interpolate(x, mode=mode, **to), atol=0, rtol=0)

    on_mesh("dp=2,tp=2", body, seed)


def test_gradients_of_interpolate(seed):
    def body(r):
        for mode in ("bilinear", "bicubic"):
            for layout in ("[dp],[tp],[],[]", "[],[],[dp],[tp]", "[dp],[],[],[] P{tp}"):
                compare(r, lambda x, mode=mode: F.interpolate(x, (9, 7), mode=mode), [r.randn(4, 4, 6, 10)], [layout])

    on_mesh("dp=2,tp=2", body, seed)
