# Enables the CUDA language: an nvcc of torch's CUDA version, from CUDACXX, CUDA_HOME, PATH, /usr/local/cuda or the
# PyPI wheel (nvidia/cu13/bin/nvcc), in this order. Include before any target is made.

set(candidates "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin/nvcc")
find_program(nvcc_on_path nvcc NO_CACHE)
list(APPEND candidates "${nvcc_on_path}" /usr/local/cuda/bin/nvcc "${TORCH_FACT_cuda_wheel_nvcc}")
string(REGEX MATCH "^[0-9]+" cuda_major "${TORCH_FACT_cuda}")
set(seen "")
foreach(nvcc IN LISTS candidates)
  if(NOT nvcc OR NOT EXISTS "${nvcc}")
    continue()
  endif()
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE nvcc_text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" unused "${nvcc_text}")
  set(nvcc_version "${CMAKE_MATCH_1}")
  list(APPEND seen "${nvcc} (${nvcc_version})")
  if(nvcc_version VERSION_EQUAL TORCH_FACT_cuda)
    set(chosen "${nvcc}")
    break()
  elseif(NOT DEFINED same_major AND nvcc_version MATCHES "^${cuda_major}\\.")
    set(same_major "${nvcc}")
  endif()
endforeach()
if(NOT DEFINED chosen AND DEFINED same_major)
  message(WARNING "torch_overlap: torch is built for CUDA ${TORCH_FACT_cuda}; using ${same_major}")
  set(chosen "${same_major}")
endif()
if(NOT DEFINED chosen)
  message(FATAL_ERROR
    "torch_overlap: expected nvcc of CUDA ${TORCH_FACT_cuda}, got ${seen}; install the toolkit, or the compiler from PyPI:\n"
    "  pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl]==${TORCH_FACT_cuda}.*'\n"
    "(nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm and nvidia-cuda-cccl), or build without CUDA (FORCE_CUDA=0)")
endif()

set(CMAKE_CUDA_COMPILER "${chosen}" CACHE FILEPATH "nvcc" FORCE)
set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # cuda::cudart is linked by hand: the wheel's, which torch has loaded
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  # Plain kernels: sm_80 and sm_90 code, and PTX for what is newer. Hopper kernels: torch_overlap_sm90a_sources.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
if(chosen STREQUAL TORCH_FACT_cuda_wheel_nvcc)
  # The wheel's libraries lie in lib/, where its nvcc looks in lib64/; only CMake's own test programs need them.
  set(ENV{LIBRARY_PATH} "${TORCH_FACT_cuda_wheel_dir}/lib:$ENV{LIBRARY_PATH}")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
