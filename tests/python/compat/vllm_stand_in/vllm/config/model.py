from dataclasses import dataclass

import torch


@dataclass
class ModelConfig:
    dtype: torch.dtype = torch.bfloat16
    hidden_size: int = 32

    def get_hidden_size(self) -> int:
        return self.hidden_size
