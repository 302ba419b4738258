# CUDA headers reach only the files in folders of these names. Everything else compiles with the same command line
# whether CUDA is on or off, so the second build re-uses its objects (ccache) and no CUDA type leaks into the core.
function(torch_overlap_cuda_files result)
  set(found "")
  foreach(file IN LISTS ARGN)
    string(REPLACE "${PROJECT_SOURCE_DIR}/" "/" inside "${file}")
    if(inside MATCHES "/(cuda|nccl|cublaslt|sm90)/|\\.cu$")
      list(APPEND found "${file}")
    endif()
  endforeach()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# torch_overlap_sm90a_sources(<file.cu>...): files for sm_90a alone (wgmma, TMA), compiled apart and linked in.
function(torch_overlap_sm90a_sources)
  if(NOT TARGET torch_overlap_sm90a)
    add_library(torch_overlap_sm90a OBJECT)
    set_target_properties(torch_overlap_sm90a PROPERTIES CUDA_ARCHITECTURES 90a-real POSITION_INDEPENDENT_CODE ON
                                                          UNITY_BUILD OFF)  # each takes minutes
    torch_overlap_compile_flags(torch_overlap_sm90a)
    target_include_directories(torch_overlap_sm90a SYSTEM PRIVATE "${TORCH_FACT_nccl_dir}/include")
    target_include_directories(torch_overlap_sm90a PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
    target_link_libraries(torch_overlap PRIVATE torch_overlap_sm90a)
  endif()
  target_sources(torch_overlap_sm90a PRIVATE ${ARGN})
endfunction()

# Gives the CUDA files of a target the include folders and definitions of torch::cuda and NCCL, and links both.
# Call it when all sources are added.
function(torch_overlap_use_cuda target)
  get_target_property(sources ${target} SOURCES)
  torch_overlap_cuda_files(sources ${sources})
  set(nccl_flags -isystem "${TORCH_FACT_nccl_dir}/include")
  set(cuda_flags -DUSE_C10D_NCCL -isystem "${TORCH_FACT_cuda_wheel_dir}/include")
  # The wheel of the runtime has no crt/: those headers come with the compiler.
  foreach(folder IN LISTS CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES)
    list(APPEND cuda_flags -idirafter "${folder}")
  endforeach()
  foreach(source IN LISTS sources)
    set_source_files_properties("${source}" TARGET_DIRECTORY ${target} PROPERTIES
      COMPILE_OPTIONS "${nccl_flags};$<$<COMPILE_LANGUAGE:CXX>:${cuda_flags}>")
  endforeach()
  target_link_libraries(${target} PRIVATE
    $<LINK_ONLY:torch::cuda> $<LINK_ONLY:torch::c10_cuda> $<LINK_ONLY:nccl::nccl> $<LINK_ONLY:cuda::cublasLt>
    $<LINK_ONLY:cuda::cudart>)
endfunction()
