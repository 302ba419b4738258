class CudaSRTPlatform:
    device_type = "cuda"

    def get_torch_distributed_backend_str(self) -> str:
        return "nccl"
