"""Compares quantization to 8-bit floats and back with torch's operators, eager and compiled, and the memory's rate.

    python benchmarks/quantize.py --out benchmarks/results

One GPU. Each variant runs in CUDA graphs on tensors that rotate, together four times the L2 cache, and takes turns
with the others within every round; ratios are medians over rounds. "torch": the same values by torch's operators,
"compiled": the same by torch.compile. "both": also the transposed matrix, quantized along its rows. floor: x read once
and all results written once, at the rate of the faster of a copy and a kernel over 1 GiB in the same run; lower times
are possible, since written data may stay in the cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torch_overlap import ops
from torch_overlap._timing import Stopwatch, in_graph, interleave, ratio_of, spread_of
from torch_overlap.ops.gemm import ScalingMode
from torch_overlap.tools.bench.ranks import LEAD_CYCLES
from torch_overlap.tools.bench.result import result, write

SHAPES = [(8192, 4096), (2048, 4096), (128, 8192)]
L2 = 64 << 20
MODES = {
    "tensor": ScalingMode.CURRENT_TENSOR_SCALING,
    "delayed": ScalingMode.DELAYED_TENSOR_SCALING,
    "row": ScalingMode.ROW_SCALING,
    "1x128": ScalingMode.BLOCK_1D_SCALING,
    "128x128": ScalingMode.BLOCK_2D_SCALING,
    "mxfp8": ScalingMode.MXFP8_1D_SCALING,
}
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0

Made = tuple[Tensor, ...]


def ours(x: Tensor, mode: str, columnwise: bool, scale: Tensor) -> Made:
    if mode == "delayed":
        return tuple(ops.quantize_delayed(x, scale, E4M3, columnwise=columnwise))
    return tuple(ops.quantize(x, MODES[mode], E4M3, columnwise=columnwise))


def to_8_bits(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3)


def by_torch(x: Tensor, mode: str, columnwise: bool, scale: Tensor) -> Made:
    """Quantizes by torch's operators, without the handling of zeros and infinities."""
    rows, columns = x.shape
    if mode in ("tensor", "delayed"):
        amax = x.abs().amax().float()
        factor = LARGEST / amax if mode == "tensor" else scale
        data = to_8_bits(x, factor)
        return (data, 1 / factor, amax) + ((data.t().contiguous(),) if columnwise else ())
    if mode == "128x128":
        blocks = x.view(rows // 128, 128, columns // 128, 128)
        factor = LARGEST / blocks.abs().amax((1, 3), keepdim=True).float()
        data = to_8_bits(blocks, factor).view(rows, columns)
        return (data, 1 / factor) + ((data.t().contiguous(),) if columnwise else ())

    def lines(matrix: Tensor) -> Made:
        width = {"row": matrix.shape[1], "1x128": 128, "mxfp8": 32}[mode]
        blocks = matrix.reshape(matrix.shape[0], -1, width)
        amax = blocks.abs().amax(-1, keepdim=True).float()
        if mode != "mxfp8":
            factor = LARGEST / amax
            return to_8_bits(blocks, factor).view(matrix.shape), 1 / factor
        exponent = torch.ceil(torch.log2(amax / LARGEST)).clamp(-127, 127)
        return to_8_bits(blocks, torch.exp2(-exponent)).view(matrix.shape), (exponent + 127).to(torch.uint8)

    return lines(x) + (lines(x.t()) if columnwise else ())


def sampler_of(call: Callable[[Tensor], object], inputs: list[Tensor]) -> Callable[[], float]:
    def all_inputs() -> list[object]:
        return [call(x) for x in inputs]  # all results exist at once: none reuses another's memory

    all_inputs()
    turns = -(-8 // len(inputs))
    watch = Stopwatch(torch.device("cuda"), meet=lambda: None, lead_cycles=LEAD_CYCLES)
    return watch.sampler(in_graph(all_inputs, turns), calls=turns * len(inputs))


def memory_rate() -> float:
    """Returns bytes read and written per microsecond by the faster of a copy and a torch kernel."""
    a, b = (torch.empty(1 << 29, dtype=torch.int16, device="cuda") for _ in range(2))
    samplers = {"copy": sampler_of(b.copy_, [a]), "kernel": sampler_of(partial(torch.bitwise_not, out=b), [a])}
    samples = interleave(samplers, 8)
    return 2 * a.nbytes / min(spread_of(samples[name]).median for name in samplers)


def measure(
    shape: tuple[int, int], mode: str, columnwise: bool, rounds: int, rate: float, compiles: bool
) -> dict[str, object]:
    size = shape[0] * shape[1] * 2
    inputs = [torch.randn(shape, device="cuda").bfloat16() for _ in range(max(2, -(-4 * L2 // size)))]
    scale = torch.full((), 3.0, device="cuda")
    variants = {"ours": partial(ours, mode=mode, columnwise=columnwise, scale=scale.view(1))}
    variants["torch"] = partial(by_torch, mode=mode, columnwise=columnwise, scale=scale)
    if compiles:
        torch._dynamo.reset()
        compiled = torch.compile(by_torch, dynamic=False, fullgraph=True)
        variants["compiled"] = partial(compiled, mode=mode, columnwise=columnwise, scale=scale)
    samplers = {}
    for name, call in variants.items():
        try:
            samplers[name] = sampler_of(call, inputs)
        except Exception as error:  # the compiler's dependencies may be missing
            print(f"{mode} {shape} {name} is left out: {str(error).splitlines()[0]}", flush=True)
    samples = interleave(samplers, rounds)
    us, iqr = spread_of(samples["ours"])
    made = variants["ours"](inputs[0])
    floor = (inputs[0].nbytes + sum(t.nbytes for t in {t.data_ptr(): t for t in made}.values())) / rate
    peers = {name: spread_of(samples[name]).median for name in samplers if name != "ours"}
    faster = {name: 1 / ratio_of(samples, "ours", name).median for name in peers}
    text = f"{us:7.1f} us +- {iqr:4.1f}  {us / floor:5.2f} x floor"
    others = "  ".join(f"{name} {peers[name]:7.1f} ({faster[name]:.1f} x)" for name in peers)
    print(f"{mode:8s} {shape!s:14s} {'both' if columnwise else 'rows':5s} {text}  {others}", flush=True)
    return {
        "op": "quantize", "shape": [*shape], "dtype": "bf16", "tp": 1, "mode": "graph", "algorithm": mode,
        "columnwise": columnwise, "us": us, "iqr_us": iqr, "floor_us": floor, "peers": peers,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="a mode; no file is written")
    parser.add_argument("--compile", action="store_true", help="torch.compile's kernels of the first shape, too")
    args = parser.parse_args()
    rate = memory_rate()
    print(f"memory is read and written at {rate / 1e6:.2f} TB/s")
    rows = [
        measure(shape, mode, columnwise, args.rounds, rate, args.compile and shape == SHAPES[0])
        for shape in SHAPES
        for mode in MODES
        if args.only in mode
        for columnwise in (False, True)
    ]
    if not args.only:
        print(write(result("quantize", rows, memory_tb_s=rate / 1e6), 1, args.out))


if __name__ == "__main__":
    main()
