"""The decoding example: tokens as on one rank, and as transformers generates them."""

import re
import sys

import pytest
import torch
from launcher import EXAMPLES

from torch_overlap.testing import run_ranks


def test_tokens_are_those_of_one_rank(launcher):
    options = ("--sums", "fused,nccl", "--batches", "1,3", "--new", "8", "--chunk", "7", "--float8")
    code, printed = launcher.run_ranks(2, "decode_llama.py", "--device", "cpu", *options)
    assert code == 0, printed
    assert re.search(r"float32: 0 of 72 tokens differ, logits within \S+e-0[6-9]", printed), printed
    for batch in (1, 3):
        for kind in ("fused", "nccl"):
            assert len(re.findall(rf"^batch +{batch} +{kind} +[\d,]+ tokens/s", printed, re.M)) == 2, printed
    assert re.search(r"float8_e4m3fn: logits within \S+ \(allowed", printed), printed


@pytest.mark.parametrize(("options", "expected"), [
    (("--new", "0"), "expected --new of at least 1, got 0"),
    (("--batches", "2,0"), "expected --batches of at least 1, got 0"),
    (("--sums", "torch"), "expected --sums without torch on cpu"),
    (("--sums", "fused,flashinfer"), "expected --sums without flashinfer on cpu"),
    (("--float8", "--sums", "torch", "--device", "cuda"), "expected --sums other than torch with --float8"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(launcher, options, expected):
    program = launcher.fork(EXAMPLES / "decode_llama.py", "--device", "cpu", *options)
    assert program.wait() == 2
    assert expected in program.printed()


def generate_rank(comm, path, prompts, new, chunk, sums):
    sys.path.insert(0, str(EXAMPLES))
    from llama.decoder import Decoder
    from llama.weights import saved_weights

    decoder = Decoder(saved_weights(path), comm, batch=4, tokens=64, dtype=torch.float32, sums=sums)
    with pytest.raises(ValueError, match=r"expected at most 4 sequences of 64 tokens .*, got 3 of 60 \+ 5"):
        decoder.generate(prompts.new_zeros(3, 60), 5)
    # Prompts by chunks of 4, 3 or 1 tokens of 3 sequences: some of 12 rows, which are scattered over the ranks.
    scattered = Decoder(saved_weights(path), comm, batch=4, tokens=64, dtype=torch.float32, sums=sums, sequence_rows=8)
    assert torch.equal(scattered.generate(prompts, new, chunk), decoder.generate(prompts, new, chunk))
    # Batches of other sizes in between: each has a state of its own, and all share the cache.
    every = [decoder.generate(prompts[:batch], new, chunk) for batch in (3, 1, 3)]
    assert torch.equal(every[0], every[2])
    assert torch.equal(every[0][:1], every[1])
    return every[0], decoder.teacher_forced(every[0])


@pytest.mark.parametrize(("ranks", "tied", "sums"), [(2, False, "fused"), (1, True, "fused"), (2, True, "nccl")])
def test_a_model_of_transformers(tmp_path, seed, ranks, tied, sums):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=tied, rope_theta=5000.0, initializer_range=0.2,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    model.float().save_pretrained(tmp_path)
    model.double()
    prompts = torch.randint(96, (3, 11))
    results = run_ranks(generate_rank, ranks, str(tmp_path), prompts, 20, 4, sums, backend="gloo", timeout=200)
    with torch.no_grad():
        wanted = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False)
        logits = model(results[0][0]).logits
    for tokens, found in results:
        torch.testing.assert_close(found.double(), logits, rtol=1e-3, atol=1e-4 * logits.abs().max().item())
        assert torch.equal(tokens, wanted)


def float8_rank(comm, seed, tokens, float8):
    sys.path.insert(0, str(EXAMPLES))
    from llama.decoder import Decoder
    from llama.weights import random_weights

    weights = random_weights("tiny", None, seed, torch.device("cpu"))
    rooms = {"batch": 3, "tokens": 24, "dtype": torch.float32, "float8": float8}
    options = [{}, {"sums": "nccl"}, {"sequence_rows": 8}]
    return [Decoder(weights, comm, **rooms, **each).teacher_forced(tokens) for each in options]


def test_float8_is_near_one_rank_without_it(seed):
    tokens = torch.randint(256, (3, 24))
    wanted = run_ranks(float8_rank, 1, seed, tokens, False, backend="local")[0][0]
    for logits in run_ranks(float8_rank, 2, seed, tokens, True, backend="local"):
        for one in logits:
            assert (one - wanted).norm() <= 0.15 * wanted.norm()
            assert (one - logits[0]).norm() <= 0.05 * wanted.norm()


def test_another_model_of_transformers_is_refused(launcher, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        attention_bias=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    code, printed = launcher.run_ranks(1, "decode_llama.py", "--device", "cpu", "--model", tmp_path)
    assert code != 0
    assert "expected a model with attention_bias False, got True" in printed
