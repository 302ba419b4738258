# Compile through ccache where it is found. Paths are hashed relative to the source tree, so build folders and
# checkouts share their objects.
find_program(CCACHE ccache)
if(CCACHE)
  set(launcher env "CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
endif()
