from dataclasses import dataclass


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 2
    enable_elastic_ep: bool = False
