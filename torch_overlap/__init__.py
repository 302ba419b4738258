"""torch_overlap: a communicator (`TorchComm`) and communication-overlapped operators for PyTorch.

    import torch, torch_overlap as to
    comm = to.new_comm("nccl", torch.device("cuda"), name="tp")
    work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    work.wait()
"""

from torch_overlap._load import load_library

load_library()
