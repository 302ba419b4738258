"""The parts of the training example that need no ranks."""

import math

import pytest
import torch


def test_batches_are_the_same_for_any_number_of_ranks(gpt):
    text = gpt("text")
    data = torch.randint(256, (5000,), dtype=torch.uint8)
    whole = text.batch(data, seed=3, step=7, size=5, sequence=24, rows=slice(0, 24))
    for ranks in (2, 3, 4):
        rows = 24 // ranks
        parts = [
            text.batch(data, seed=3, step=7, size=5, sequence=24, rows=slice(r * rows, (r + 1) * rows))
            for r in range(ranks)
        ]
        for full, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), full)


def test_targets_are_the_next_bytes_and_steps_differ(gpt):
    text = gpt("text")
    data = torch.arange(4000).remainder(251).to(torch.uint8)
    inputs, targets = text.batch(data, seed=0, step=0, size=4, sequence=16, rows=slice(0, 16))
    assert torch.equal(targets, (inputs + 1).remainder(251))
    assert torch.equal(targets[:-1], inputs[1:])
    other, _ = text.batch(data, seed=0, step=1, size=4, sequence=16, rows=slice(0, 16))
    assert not torch.equal(other, inputs)


def test_the_standard_library_is_found(gpt):
    files = gpt("text").stdlib_files()
    assert {"os.py", "abc.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts for path in files)


@pytest.mark.parametrize(
    ("losses", "expected", "good", "text"),
    [
        ([5.0, 4.0], [5.0, 4.0005], True, "2 steps equal within 5.0e-04 (allowed: 0.001)"),
        ([5.0, 4.0], [5.0, 4.002], False, "expected loss 4.002000 within 0.001 at step 1, got 4.000000; "),
        ([math.nan], [math.nan], False, "expected loss nan within 0.001 at step 0, got nan; "),
    ],
)
def test_the_check_is_step_by_step(gpt, losses, expected, good, text):
    verdict = gpt("check").compare(losses, expected, 1e-3)
    assert verdict.good is good
    assert verdict.text.startswith(text)


def event(name: str, lane: int, start: float, end: float, category: str = "cpu_op") -> dict:
    return {"ph": "X", "cat": category, "name": name, "tid": lane, "ts": 100.0 + start, "dur": end - start}


def test_the_timeline_of_the_cpu_shows_gemms_and_chunks_in_flight(gpt):
    events = [
        event("torch_overlap::all_gather_matmul", 1, 0, 30),
        event("torch_overlap::chunk_comm[1]", 1, 0, 1, "user_annotation"),
        event("torch_overlap::chunk_gemm[0]", 1, 2, 10, "user_annotation"),
        event("aten::mm", 1, 3, 9),
        event("torch_overlap::chunk_wait[1]", 1, 10, 12, "user_annotation"),
        event("aten::linear", 1, 12, 20),
        event("aten::mm", 1, 13, 19),
        event("aten::add", 1, 30, 32),
        event("torch_overlap::all_reduce_", 1, 32, 35),
    ]
    assert [(s.lane, s.kind, s.start, s.end) for s in gpt("timeline").spans(events)] == [
        ("thread 1", "GEMM", 2, 10),
        ("thread 1", "GEMM", 12, 20),
        ("thread 1", "communication", 32, 35),
        ("in flight", "communication", 0, 12),
    ]


def test_the_timeline_of_a_gpu_is_its_kernels(gpt):
    timeline = gpt("timeline")
    events = [
        event("aten::mm", 1, 0, 1),
        event("nvjet_hsh_128x64", 7, 5, 9, "kernel"),
        event("ncclDevKernel_AllGather_RING_LL", 20, 4, 8, "kernel"),
    ]
    assert [(s.lane, s.kind) for s in timeline.spans(events)] == [("communication", "communication"), ("GEMM", "GEMM")]


def test_hidden_share_counts_overlapping_time_once(gpt):
    timeline = gpt("timeline")
    spans = [
        timeline.Span("a", "communication", 0, 10),
        timeline.Span("b", "communication", 5, 15),
        timeline.Span("c", "GEMM", 12, 20),
        timeline.Span("d", "GEMM", 0, 3),
    ]
    assert timeline.hidden_share(spans) == pytest.approx(6 / 15)
    assert timeline.hidden_share([]) == 0.0


def test_progress_without_a_terminal_is_a_few_lines(gpt, capsys):
    progress = gpt("progress").Progress(200, 10, shown=True)
    for step in range(200):
        progress.update(step + 1, torch.tensor(1.5))
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 30
    assert lines[0].startswith("step   1/200  loss 1.5000")
    assert lines[-1].startswith("step 200/200")
