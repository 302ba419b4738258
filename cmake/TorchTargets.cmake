# Imported targets made from the torch wheel of the Python in use, or of TORCH_OVERLAP_TORCH_PYTHON: torch::c10,
# torch::cpu, torch::python, and with TORCH_OVERLAP_CUDA torch::c10_cuda, torch::cuda, cuda::cudart, cuda::cublasLt,
# nccl::nccl (the wheel's own libnccl: a process must hold one). find_package(Torch) is not used: it stops where there is
# no toolkit, or no GPU.
# Sets TORCH_FACT_<name> for each line of torch_facts.py, and TORCH_OVERLAP_CUDA's default.

find_package(Python3 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)
if(NOT Python3_Development.Module_FOUND)
  message(FATAL_ERROR "torch_overlap: ${Python3_EXECUTABLE} has no Python.h; install its headers "
                      "(Debian, Ubuntu: apt-get install python3-dev)")
endif()

# The headers of torch and of jax are the same for every Python: wheels for several Pythons need one environment with both.
set(TORCH_OVERLAP_TORCH_PYTHON "" CACHE FILEPATH "The Python whose torch and jax are built for; default: Python3_EXECUTABLE")
set(torch_python "${TORCH_OVERLAP_TORCH_PYTHON}")
if(NOT torch_python)
  set(torch_python "${Python3_EXECUTABLE}")
endif()

# -I: pip's isolated build hides the environment through PYTHONPATH.
execute_process(COMMAND "${torch_python}" -I "${CMAKE_CURRENT_LIST_DIR}/torch_facts.py"
                OUTPUT_VARIABLE facts ERROR_VARIABLE facts_error RESULT_VARIABLE facts_result)
if(NOT facts_result EQUAL 0)
  message(FATAL_ERROR "torch_overlap: expected torch >= 2.11 in ${torch_python}, got:\n${facts_error}"
                      "install it first (pip install torch==2.11.0), and build with --no-build-isolation")
endif()
foreach(fact version version_base dir cxx11_abi cuda gpu cuda_wheel_dir cuda_wheel_nvcc nccl_dir nccl)
  string(JSON TORCH_FACT_${fact} GET "${facts}" ${fact})
endforeach()
if(TORCH_FACT_version_base VERSION_LESS 2.11)
  message(FATAL_ERROR "torch_overlap: expected torch >= 2.11, got ${TORCH_FACT_version} in ${TORCH_FACT_dir}; "
                      "pip install torch==2.11.0")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${TORCH_FACT_dir}/version.py"
                                                               "${CMAKE_CURRENT_LIST_DIR}/torch_facts.py")

if(DEFINED ENV{FORCE_CUDA})
  set(TORCH_OVERLAP_CUDA_DEFAULT "$ENV{FORCE_CUDA}")
else()
  set(TORCH_OVERLAP_CUDA_DEFAULT ${TORCH_FACT_gpu})
endif()
option(TORCH_OVERLAP_CUDA "Build the CUDA and NCCL parts" ${TORCH_OVERLAP_CUDA_DEFAULT})

# torch_overlap_import(<target> <library file> [LINKS <targets>] [INCLUDES <folders>] [DEFINES <macros>])
function(torch_overlap_import name file)
  cmake_parse_arguments(arg "" "" "LINKS;INCLUDES;DEFINES" ${ARGN})
  if(TARGET ${name})
    return()
  endif()
  foreach(path "${file}" ${arg_INCLUDES})
    if(NOT EXISTS "${path}")
      message(FATAL_ERROR "torch_overlap: ${name} needs ${path}, which is not there; "
                          "reinstall torch ${TORCH_FACT_version} and the nvidia-* wheels it asks for")
    endif()
  endforeach()
  add_library(${name} SHARED IMPORTED GLOBAL)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION "${file}")
  target_include_directories(${name} SYSTEM INTERFACE ${arg_INCLUDES})
  target_link_libraries(${name} INTERFACE ${arg_LINKS})
  target_compile_definitions(${name} INTERFACE ${arg_DEFINES})
endfunction()

set(torch_lib "${TORCH_FACT_dir}/lib")
set(torch_include "${TORCH_FACT_dir}/include")
torch_overlap_import(torch::c10 "${torch_lib}/libc10.so" INCLUDES "${torch_include}"
                     DEFINES _GLIBCXX_USE_CXX11_ABI=${TORCH_FACT_cxx11_abi} USE_DISTRIBUTED)
torch_overlap_import(torch::cpu "${torch_lib}/libtorch_cpu.so" LINKS torch::c10
                     INCLUDES "${torch_include}/torch/csrc/api/include")
# pybind11 is the copy inside torch/include: PyPI's newer one does not share c10d's types.
torch_overlap_import(torch::python "${torch_lib}/libtorch_python.so" LINKS torch::cpu Python3::Module)

if(TORCH_OVERLAP_CUDA)
  if(NOT TORCH_FACT_cuda)
    message(FATAL_ERROR "torch_overlap: TORCH_OVERLAP_CUDA needs a torch built for CUDA, got ${TORCH_FACT_version}; "
                        "install one, or unset FORCE_CUDA")
  endif()
  string(REGEX MATCH "^[0-9]+" cuda_major "${TORCH_FACT_cuda}")
  foreach(folder cuda_wheel_dir nccl_dir)
    if(NOT TORCH_FACT_${folder})
      message(FATAL_ERROR "torch_overlap: ${folder} not found: expected the nvidia-* wheels that torch "
                          "${TORCH_FACT_version} asks for (pip install --force-reinstall torch==${TORCH_FACT_version_base})")
    endif()
  endforeach()
  set(cuda_lib "${TORCH_FACT_cuda_wheel_dir}/lib")
  # Only .cpp files see the wheel's CUDA headers; nvcc brings its own, which may be of another minor version.
  torch_overlap_import(cuda::cudart "${cuda_lib}/libcudart.so.${cuda_major}")
  target_include_directories(cuda::cudart SYSTEM INTERFACE
                             "$<$<COMPILE_LANGUAGE:CXX>:${TORCH_FACT_cuda_wheel_dir}/include>")
  torch_overlap_import(cuda::cublasLt "${cuda_lib}/libcublasLt.so.${cuda_major}" LINKS cuda::cudart)
  torch_overlap_import(nccl::nccl "${TORCH_FACT_nccl_dir}/lib/libnccl.so.2" LINKS cuda::cudart
                       INCLUDES "${TORCH_FACT_nccl_dir}/include")
  torch_overlap_import(torch::c10_cuda "${torch_lib}/libc10_cuda.so" LINKS torch::c10 cuda::cudart)
  torch_overlap_import(torch::cuda "${torch_lib}/libtorch_cuda.so" LINKS torch::cpu torch::c10_cuda
                       DEFINES USE_C10D_NCCL)
endif()
