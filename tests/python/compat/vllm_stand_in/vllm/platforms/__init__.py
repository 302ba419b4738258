import os


def cuda_platform_plugin() -> str | None:
    has_gpu = os.environ.get("STAND_IN_GPUS", "1") != "0"
    return "vllm.platforms.cuda.CudaPlatform" if has_gpu else None
