"""Ways to replay graphs of steps that check themselves. What comes of it the caller asks the step."""

import random
import time

import torch


def replay_and_call_in_turn(comm, step, graph, seed, times):
    """Replays and eager calls, in random order; one rank is late on its device now and then."""
    choose = random.Random(seed)
    for _ in range(times):
        if choose.randrange(5 * comm.get_size()) == comm.get_rank():
            torch.cuda._sleep(4_000_000)
        graph.replay() if choose.random() < 0.5 else step()
    torch.cuda.synchronize()


def replay_at_once(graphs, times):
    """Each on a stream of its own, which nothing orders."""
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(times):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()


def replay_with_late_ranks(comm, graph, seed, times=200):
    """One rank's host is 1 to 10 ms late, every time."""
    choose = random.Random(seed)
    for _ in range(times):
        late, delay = choose.randrange(comm.get_size()), choose.uniform(1e-3, 10e-3)
        if comm.get_rank() == late:
            time.sleep(delay)
        graph.replay()
    torch.cuda.synchronize()


def replay_ten_thousand_times(*graphs):
    """In turns."""
    for i in range(10_000):
        graphs[i % len(graphs)].replay()
        if i % 1000 == 999:
            torch.cuda.synchronize()
