"""Profile of one call: the times at which each named range of the host was issued, and ran."""

import json

import torch
from torch.profiler import ProfilerActivity, profile

COMM = ("torch_overlap::exchange", "torch_overlap::chunk_comm")
GEMM = ("torch_overlap::gemm", "torch_overlap::chunk_gemm")


class Task:
    """The device work of one named range of the host: the time when it was issued, and the times when it ran."""

    def __init__(self, span, launches, on_device):
        begin, end = span["ts"], span["ts"] + span["dur"]
        inside = [one for one in launches if begin <= one["ts"] <= end]
        ran = [on_device[c] for one in inside if (c := one["args"]["correlation"]) in on_device]
        self.name = span["name"]
        self.issued = max((one["ts"] for one in inside if one["args"]["correlation"] in on_device), default=None)
        self.begin = min((one["ts"] for one in ran), default=None)
        self.end = max((one["ts"] + one["dur"] for one in ran), default=None)
        self.streams = {one["args"]["stream"] for one in ran}

    def __repr__(self):
        return f"{self.name} issued {self.issued}, on the device {self.begin} to {self.end}"


def traced_tasks(run, path):
    """Returns the device work of `run` under names of the library, in the order of the host."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    launches = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]]
    on_device = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    spans = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    tasks = [Task(e, launches, on_device) for e in spans if e["name"].startswith("torch_overlap::")]
    return [task for task in tasks if task.streams]


def tasks_of(run, path):
    """Returns the transfers and the products of `run`."""
    tasks = traced_tasks(run, path)
    return [[task for task in tasks if task.name.startswith(names)] for names in (COMM, GEMM)]
