"""Plans for parallelize_module: models of plain torch compared with themselves, unsharded, in fp64."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama_cases import DIM, HEAD_DIM, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Llama, plan, start
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import torch_overlap as to
from torch_overlap.nn import ColumnParallelLinear, RowParallelLinear
from torch_overlap.nn.styles import (
    ColumnParallel,
    GatherSequence,
    RowParallel,
    SequenceParallel,
    ShardInput,
    SharedGather,
    comm_of,
    parallelize,
)
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(600)
BATCH = 2


def close(got, want):
    tolerance = 1e-8 if got.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def train_both(model, whole, tokens, targets, run=lambda model: model):
    """Computes the losses of both models, which must be close, and leaves the gradients in their parameters."""
    losses = []
    for one in (run(model), whole):
        logits = one(tokens)
        losses.append(F.cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), targets.flatten()))
        losses[-1].backward()
    close(losses[0], losses[1])


def compare_gradients(model, whole):
    split, full = to.nn.split_parameters(model), dict(whole.named_parameters())
    assert {name for name, _ in model.named_parameters()} == set(full)
    for name, parameter in model.named_parameters():
        want, got = full[name].grad, parameter.grad
        if isinstance(got, DTensor):
            assert got.placements == parameter.placements
            assert got.placements[0] == (Shard(split[name][1]) if name in split else Replicate())
            got = got.full_tensor()
        close(got, want)
    return split


def titan(rank, size, store, seed, sequence_parallel, kv_heads, bias, algorithm):
    mesh = start(rank, size, store)
    torch.manual_seed(seed + rank)  # the plan uses rank 0's values; parameters outside of it must already be equal
    model = Llama(kv_heads, bias).double()
    state = model.state_dict()
    dist.broadcast_object_list(received := [state], src=0)
    whole = Llama(kv_heads, bias).double()
    whole.load_state_dict(received[0])
    model.tok_embeddings.load_state_dict(whole.tok_embeddings.state_dict())
    parallelize_module(model, mesh, plan(sequence_parallel, algorithm))
    full = to.nn.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in whole.state_dict().items())
    assert isinstance(model.layers["0"].attention.wq, ColumnParallelLinear)
    assert isinstance(model.layers["1"].feed_forward.w2, RowParallelLinear)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        model.zero_grad()
        whole.zero_grad()
        tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
        train_both(model, whole, tokens, targets)
        split = compare_gradients(model, whole)
    assert len(split) == 2 * (7 + (5 if bias else 0)) + 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("kv_heads", "bias", "algorithm"), [(6, False, "auto"), (6, True, "pipelined")])
def test_a_plan_takes_a_model_as_it_is(seed, size, sequence_parallel, kv_heads, bias, algorithm):
    run_ranks(titan, size, seed, sequence_parallel, kv_heads, bias, algorithm, comm=False, timeout=120)


def test_grouped_query_heads_on_two_ranks_and_one(seed):
    run_ranks(titan, 2, seed, True, 2, False, "pipelined", comm=False, timeout=120)
    run_ranks(titan, 1, seed, True, 2, False, "pipelined", comm=False, timeout=120)


def recomputed(rank, size, store, seed):
    """A copy of the parallel model, whose blocks are recomputed in the backward pass."""
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Llama().double()
    model = copy.deepcopy(parallelize_module(copy.deepcopy(whole), mesh, plan(True, "pipelined")))
    for block in model.layers.values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    train_both(model, whole, tokens, targets)
    compare_gradients(model, whole)


def test_activation_checkpointing_of_a_copied_model(seed):
    run_ranks(recomputed, 2, seed, comm=False, timeout=120)


# --- Gathers ------------------------------------------------------------------------------------------


def counted(rank, size, store, sequence_parallel):
    mesh = start(rank, size, store)
    model = parallelize_module(Llama(), mesh, plan(sequence_parallel, "sequential"))
    comm, names = comm_of(mesh), []
    hook = comm.register_pre_hook(lambda name, *_: names.append(str(name).rpartition(".")[2]))
    loss = model(torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)).sum()
    forward = len(names)
    loss.backward()
    hook.remove()
    return forward, len(names) - forward


def test_linears_that_share_their_input_share_one_transfer():
    # Forward: two gathers and two sums per block; the head gathers its input and the logits. Backward: two gathers, two
    # sums and two repeated gathers per block; a gather and a sum of the head; the embedding's gradient; 5 norms' sums.
    assert run_ranks(counted, 2, True, comm=False) == [(2 * 4 + 2, 2 * 6 + 2 + 1 + 5)] * 2
    # Forward: two sums per block, and the logits. Backward: two sums per block, and one of the head.
    assert run_ranks(counted, 2, False, comm=False) == [(2 * 2 + 1, 2 * 2 + 1)] * 2


class Named(nn.Module):
    """Passes the inputs of its linears by name."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.down(input=F.silu(self.gate(input=x)) * self.up(input=x))


def by_name(rank, size, store, seed, sequence_parallel, shares):
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    whole = Named().double()
    options = {"sequence_parallel": sequence_parallel}
    columns = {"0": SharedGather("gate", "up", **options)} if shares else dict.fromkeys(
        ("0.gate", "0.up"), ColumnParallel(**options))  # fmt: skip
    rows = {"0.down": RowParallel(**options)}
    ends = {"": ShardInput(argument="input"), "1": GatherSequence()} if sequence_parallel else {}
    model = nn.Sequential(copy.deepcopy(whole), nn.Identity())
    parallelize(model, mesh, ends | columns | rows)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    y, want = model(input=x), whole(x)
    close(y, want)
    gradient = torch.randn_like(want)
    y.backward(gradient)
    want.backward(gradient)
    compare_gradients(model[0], whole)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_inputs_passed_by_name(seed, sequence_parallel, shares):
    run_ranks(by_name, 2, seed, sequence_parallel, shares, comm=False)


# --- Hugging Face -------------------------------------------------------------------------------------


def hugging_face(rank, size, store, seed, sequence_parallel):
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = start(rank, size, store)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    torch.manual_seed(seed)
    whole = LlamaForCausalLM(config).double()
    model = LlamaForCausalLM(config).double()
    model.load_state_dict(whole.state_dict())
    options = {"sequence_parallel": sequence_parallel, "algorithm": "pipelined"}
    styles = {
        "model.layers.*.self_attn": SharedGather("q_proj", "k_proj", "v_proj", **options),
        "model.layers.*.self_attn.o_proj": RowParallel(**options),
        "model.layers.*.mlp": SharedGather("gate_proj", "up_proj", **options),
        "model.layers.*.mlp.down_proj": RowParallel(**options),
        "lm_head": ColumnParallel(gather_output=True, **options),
    }
    if sequence_parallel:
        norms = ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm")
        styles |= {name: SequenceParallel() for name in norms} | {"model.layers.0": ShardInput()}
    parallelize_module(model, mesh, styles)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    train_both(model, whole, tokens, targets)
    compare_gradients(model, whole)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_plan_takes_a_llama_of_transformers(seed, sequence_parallel):
    pytest.importorskip("transformers")
    run_ranks(hugging_face, 2, seed, sequence_parallel, comm=False, timeout=540)


# --- torch.compile ------------------------------------------------------------------------------------


def compiled(rank, size, store, seed, sequence_parallel, backend):
    torch._dynamo.reset()
    mesh = start(rank, size, store)
    torch.manual_seed(seed)
    model, whole = Llama(layers=1), Llama(layers=1)
    whole.load_state_dict(model.state_dict())
    model, whole = parallelize_module(model, mesh, plan(sequence_parallel, "pipelined", fused=True)), whole.double()
    run = torch.compile(model, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        model.zero_grad()
        whole.zero_grad()
        tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
        train_both(model, whole, tokens, targets, lambda _: run)
        compare_gradients(model, whole)


@pytest.mark.parametrize(
    ("sequence_parallel", "backend"),
    [
        (False, "aot_eager"),
        (True, "aot_eager"),
        pytest.param(True, "inductor", marks=[pytest.mark.slow, pytest.mark.inductor]),
    ],
)
def test_compile_fullgraph(seed, sequence_parallel, backend):
    run_ranks(compiled, 2, seed, sequence_parallel, backend, comm=False, timeout=540)


# --- Errors -------------------------------------------------------------------------------------------


def refuses(error, message, act):
    with pytest.raises(error, match=message):
        act()


class CheckpointedAlone(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=True)


def errors(rank, size, store):
    mesh = start(rank, size, store)
    refuses(TypeError, r"^ColumnParallel: expected an nn.Linear, got RMSNorm; change the plan",
            lambda: parallelize_module(Llama(), mesh, {"norm": ColumnParallel()}))  # fmt: skip
    refuses(TypeError, r"^SharedGather: expected an nn.Linear at 'attention_norm', got RMSNorm",
            lambda: parallelize_module(Llama(), mesh, {"layers.0": SharedGather("attention_norm")}))  # fmt: skip
    refuses(ValueError, r"^SharedGather: expected the names of one or more linears", SharedGather)
    refuses(ValueError, r"^SharedGather: expected out_features divisible by 2 ranks times 4 \(multiple_of\), got 4",
            lambda: parallelize_module(Llama(kv_heads=1), mesh, plan(True)))  # fmt: skip
    refuses(ValueError, r"^ColumnParallel: expected out_features divisible by 2 ranks times 1 \(multiple_of\), got 7",
            lambda: parallelize_module(nn.Linear(4, 7), mesh, ColumnParallel()))  # fmt: skip
    refuses(ValueError, r"^RowParallelLinear: expected in_features divisible by the group size 2, got 7",
            lambda: parallelize_module(nn.Linear(7, 4), mesh, RowParallel()))  # fmt: skip
    attention = parallelize_module(Llama(), mesh, plan(True)).layers["0"].attention
    refuses(TypeError, r"^SharedGather: expected a tensor as the first argument or as 'hidden_states', got NoneType",
            lambda: attention(x=torch.ones(1, 2, DIM), angles=None))  # fmt: skip
    refuses(ValueError, r"^SharedGather: expected its linears to be called by their module, got a call outside",
            lambda: attention.wq(torch.ones(1, 2, DIM)))  # fmt: skip
    doubles = attention.wq.register_forward_pre_hook(lambda _, args: (args[0] * 2,), prepend=True)
    refuses(ValueError, r"^SharedGather: expected its linears to get the module's first argument unchanged, got",
            lambda: attention(torch.ones(1, 2, DIM), torch.ones(4, HEAD_DIM)))  # fmt: skip
    doubles.remove()
    with torch.no_grad():
        assert attention(torch.ones(1, 2, DIM), torch.ones(4, HEAD_DIM)).shape == (1, 2, DIM)  # and still works
    mlp = parallelize_module(Llama(), mesh, plan(True)).layers["0"].feed_forward
    mlp.w1 = CheckpointedAlone(mlp.w1)
    refuses(ValueError, r"^SharedGather: expected gradients enabled in its linears as in their module, got",
            lambda: mlp(torch.ones(1, 2, DIM, requires_grad=True)))  # fmt: skip
    fused = parallelize_module(Llama(), mesh, plan(True, fused=True)).layers["0"].feed_forward
    refuses(to.UnsupportedError, r"^ColumnParallelLinear: expected an overlapped all_gather_matmul \(require_fused",
            lambda: fused(torch.ones(1, 2, DIM)))  # fmt: skip
    flat = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    refuses(ValueError, r"^comm_of: expected a mesh of one dimension, got 2", lambda: comm_of(flat))
    assert comm_of(flat["tp"]).get_size() == 2


def test_a_mistake_is_an_error_that_says_what_to_do():
    run_ranks(errors, 2, comm=False)


def stock_backend(rank, size, store):
    mesh = start(rank, size, store, backend="gloo")
    refuses(ValueError, "^comm_from_group: expected a group of backend 'torch_overlap'", lambda: comm_of(mesh))
    dist.barrier()  # gloo gives a rank its group while another still connects, which fails if the first has left


def test_a_mesh_of_another_backend_is_refused():
    run_ranks(stock_backend, 2, comm=False)


def meta(rank, size, store):
    mesh = start(rank, size, store)
    with torch.device("meta"):
        model = Llama()
    parallelize_module(model, mesh, plan(True))
    assert model.layers["0"].attention.wq.weight.is_meta
    model.to_empty(device="cpu")
    whole = Llama()
    state = whole.state_dict()
    dist.broadcast_object_list(received := [state], src=0)
    to.nn.load_full_state_dict(model, received[0])
    for name, value in to.nn.full_state_dict(model).items():
        assert torch.equal(value, received[0][name])
    assert len(to.nn.split_parameters(model)) == 15


def test_a_model_on_the_meta_device_takes_its_weights_later():
    run_ranks(meta, 2, comm=False)
