"""Ways to replay graphs of steps that check themselves. The caller reads the result from the step."""

import random
import time

import torch


def replay_and_call_in_turn(comm, step, graph, seed, times):
    """Runs replays and eager calls in random order; one rank is occasionally late on its device."""
    choose = random.Random(seed)
    for _ in range(times):
        if choose.randrange(5 * comm.get_size()) == comm.get_rank():
            torch.cuda._sleep(4_000_000)
        graph.replay() if choose.random() < 0.5 else step()
    torch.cuda.synchronize()


def replay_at_once(graphs, times):
    """Replays each graph on a stream of its own; nothing orders the streams."""
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(times):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()


def replay_with_late_ranks(comm, graph, seed, times=200):
    """Delays the host of one rank by 1 to 10 ms, every time."""
    choose = random.Random(seed)
    for _ in range(times):
        late, delay = choose.randrange(comm.get_size()), choose.uniform(1e-3, 10e-3)
        if comm.get_rank() == late:
            time.sleep(delay)
        graph.replay()
    torch.cuda.synchronize()


def replay_ten_thousand_times(*graphs):
    """Replays the graphs in turns."""
    for i in range(10_000):
        graphs[i % len(graphs)].replay()
        if i % 1000 == 999:
            torch.cuda.synchronize()
