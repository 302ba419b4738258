"""Measures the sum at the end of a layer when decoding: all_reduce, residual and RMSNorm, and its 8-bit result.

    torchrun --nproc_per_node 4 benchmarks/decode_norm.py --out benchmarks/results

Microseconds of one call, COUNT of them in a CUDA graph, variants in turns, of the slowest rank. ours: the all_reduce
alone; with residual and norm in the same kernel; with the quantization too, by one given scale, by rows, by blocks of
128 columns, and, for the rows, by an operator of its own. Peers: NCCL's and torch's one-shot all_reduce, whose input
lies in symmetric memory, each followed by torch's addition and rms_norm; FlashInfer's fused kernel, where its package
(flashinfer-python) is installed. Without a GPU it only checks that it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import torch_overlap as to
from torch_overlap._timing import in_graph, interleave, slowest_rank, spread_of
from torch_overlap.quantize import ScalingMode
from torch_overlap.tools.bench import result
from torch_overlap.tools.bench.libraries import torch_symmetric
from torch_overlap.tools.bench.ranks import Ranks

TOKENS, WIDTHS = (1, 8, 32, 64, 128), (4096, 8192)
COUNT = 20
MIB = 1 << 20
EPS = 1e-5
NCCL, TORCH, FLASHINFER = "nccl, then norm", "torch one-shot, then norm", "flashinfer"


class Norm:
    """The operands for one number of tokens, and the calls to time."""

    def __init__(self, ranks: Ranks, tokens: int, width: int, forced: dict[str, to.TorchComm]) -> None:
        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        self.ranks, self.comm, self.forced = ranks, ranks.comm, forced
        self.x = torch.randn(tokens, width, device=ranks.device).to(dtype)
        generator = torch.Generator().manual_seed(1)  # replicated
        self.residual, self.gain = (
            torch.randn(shape, generator=generator).to(ranks.device, dtype) for shape in ((tokens, width), (width,))
        )
        self.scale = torch.ones(1, device=ranks.device)

    def quantized(self, mode: ScalingMode) -> Callable[[], object]:
        scale = self.scale if mode == ScalingMode.DELAYED_TENSOR_SCALING else None
        return lambda: to.ops.all_reduce_rms_norm_quantize(
            self.x, self.residual, self.gain, self.comm, scaling_mode=mode, scale=scale, eps=EPS
        )

    def norm(self, comm: to.TorchComm | None = None) -> Tensor:
        return to.ops.all_reduce_rms_norm(self.x, self.residual, self.gain, comm or self.comm, eps=EPS)[0]

    def then_norm(self, total: Tensor) -> Tensor:
        hidden = self.residual + total
        return F.rms_norm(hidden, (hidden.shape[-1],), self.gain, EPS)

    def after_nccl(self) -> Tensor:
        total = self.x.clone()
        dist.all_reduce(total)
        return self.then_norm(total)

    def calls(self) -> dict[str, Callable[[], object]]:
        rows = ScalingMode.ROW_SCALING
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: self.comm.all_reduce(self.x, to.ReduceOp.SUM, async_op=False),
            "norm": self.norm,
            "norm, given scale": self.quantized(ScalingMode.DELAYED_TENSOR_SCALING),
            "norm, scale per row": self.quantized(rows),
            "norm, scale per block": self.quantized(ScalingMode.BLOCK_1D_SCALING),
            "norm, then scale per row": lambda: to.ops.quantize(self.norm(), rows),
            NCCL: self.after_nccl,
        }
        return calls | {f"norm by {mode}": partial(self.norm, comm) for mode, comm in self.forced.items()}

    def torch_one_shot(self) -> Callable[[], object]:
        symmetric = torch_symmetric(self.ranks.device, MIB + 2 * self.x.nbytes)
        x = symmetric.arena.empty(self.x.shape, self.x.dtype).copy_(self.x)
        return lambda: self.then_norm(symmetric.one_shot_all_reduce(x))


class FlashInfer:
    """FlashInfer's all_reduce with a residual and an RMSNorm (TensorRT-LLM's kernel), with programmatic dependent
    launches and sums in fp32. FlashInfer selects one or two shots."""

    def __init__(self, norm: Norm) -> None:
        from flashinfer import comm

        self.norm, self.api = norm, comm
        tokens, width = norm.x.shape
        self.workspace = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            norm.ranks.rank, norm.ranks.size, tokens, width, group=dist.group.WORLD
        )
        self.residual_out, self.rows = torch.empty_like(norm.x), torch.empty_like(norm.x)
        self.quantized = torch.empty_like(norm.x, dtype=torch.float8_e4m3fn)
        self.scales = torch.empty(tokens, 1, device=norm.x.device)

    def call(self, pattern: str) -> None:
        norm, patterns = self.norm, self.api.AllReduceFusionPattern
        is_quantized = pattern != "kARResidualRMSNorm"
        self.api.trtllm_allreduce_fusion(
            allreduce_in=norm.x, world_size=norm.ranks.size, world_rank=norm.ranks.rank, token_num=norm.x.shape[0],
            hidden_dim=norm.x.shape[1], workspace_ptrs=self.workspace[1], launch_with_pdl=True,
            trigger_completion_at_end=True, fp32_acc=True, pattern_code=getattr(patterns, pattern), use_oneshot=None,
            allreduce_out=None, residual_in=norm.residual, residual_out=self.residual_out,
            norm_out=None if is_quantized else self.rows, quant_out=self.quantized if is_quantized else None,
            scale_out=self.scales if "Dynamic" in pattern else None, rms_gamma=norm.gain, rms_eps=EPS,
            scale_factor=norm.scale, layout_code=None,
        )  # fmt: skip

    def calls(self) -> dict[str, Callable[[], object]]:
        """Raises: ValueError: a result differs from ours."""
        found: dict[str, Callable[[], object]] = {
            FLASHINFER: partial(self.call, "kARResidualRMSNorm"),
            f"{FLASHINFER}, given scale": partial(self.call, "kARResidualRMSNormFP8Quant"),
            f"{FLASHINFER}, scale per row": partial(self.call, "kARResidualRMSNormDynamicFP8Quant"),
        }
        norm = self.norm
        rows, hidden = to.ops.all_reduce_rms_norm(norm.x, norm.residual, norm.gain, norm.comm, eps=EPS)
        results = []
        for name, call in found.items():
            call()
            results.append(("residual", self.residual_out.clone().float(), hidden.float(), 2e-2))
            if name == FLASHINFER:
                results.append(("norm", self.rows.float(), rows.float(), 2e-2))
            else:
                scale = self.scales if "row" in name else norm.scale
                results.append(
                    (name, self.quantized.float() * scale, rows.float(), 7e-2)
                )  # e4m3 has three fraction bits
        for what, got, wanted, tolerance in results:  # after all calls, which need all ranks
            if not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance):
                error = (got - wanted).abs().max().item()
                raise ValueError(f"decode_norm: expected FlashInfer's {what} to equal ours, got a difference of "
                                 f"{error}. Check its version.")  # fmt: skip
        return found


def add_peers(norm: Norm, calls: dict[str, Callable[[], object]], missing: dict[str, str]) -> None:
    """Adds the peers that all ranks have, and why the others are not there."""

    def add(name: str, open_peer: Callable[[], dict[str, Callable[[], object]]]) -> None:
        found: dict[str, Callable[[], object]] = {}
        if reason := norm.ranks.try_on_all_ranks(lambda: found.update(open_peer())):
            missing[name] = reason
        else:
            calls.update(found)

    add(TORCH, lambda: {TORCH: norm.torch_one_shot()})
    add(FLASHINFER, lambda: FlashInfer(norm).calls())


def measure(ranks: Ranks, tokens: int, width: int, rounds: int, forced: dict[str, to.TorchComm]) -> dict[str, Any]:
    norm = Norm(ranks, tokens, width, forced)
    calls: dict[str, Callable[[], object]] = norm.calls()
    missing: dict[str, str] = {}
    if ranks.device.type == "cuda":
        add_peers(norm, calls, missing)
    samplers = {}
    for name, call in calls.items():
        call()
        norm.x.mul_(0)  # the all_reduce in place would overflow
        work = in_graph(call, COUNT) if ranks.device.type == "cuda" else call
        samplers[name] = ranks.captured.sampler(work, COUNT if ranks.device.type == "cuda" else 1)
    samples = slowest_rank(interleave(samplers, rounds), ranks.comm)
    us = {name: round(spread_of(values).median, 3) for name, values in samples.items()}
    peers = {name: us.pop(name) for name in list(us) if name.startswith((NCCL, TORCH, FLASHINFER))}
    return {"op": "all_reduce_rms_norm", "shape": [tokens, width], "dtype": str(norm.x.dtype).removeprefix("torch."),
            "tp": ranks.size, "us": us, "iqr_us": round(spread_of(samples["norm"]).iqr, 3), "peers": peers,
            **({"missing": missing} if missing else {})}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="default: %(default)s")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="default: %(default)s")
    parser.add_argument("--protocols", default="", help="also measures the norm by these, of ll, ll128, simple")
    parser.add_argument("--out", type=Path, help="the folder of the result; default: it is only printed")
    args = parser.parse_args()
    ranks = Ranks.start("cuda" if torch.cuda.is_available() else "cpu")
    everyone = list(range(ranks.size))
    forced = {}
    for protocol in filter(None, args.protocols.split(",")):
        made = ranks.comm.split(everyone, name=protocol, hints={"custom_collectives": protocol})
        assert made is not None
        forced[protocol] = made
    rows = []
    for width in map(int, args.widths.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            rows.append(measure(ranks, tokens, width, args.rounds, forced))
            ranks.say(str(rows[-1]))
    if args.out and ranks.rank == 0:
        print(result.write_result("decode_norm", ranks.size, rows, args.out))
    for comm in forced.values():
        comm.finalize()
    ranks.stop()


if __name__ == "__main__":
    main()
