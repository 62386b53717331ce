# SPDX-License-Identifier: Apache-2.0
# The target convgrad::convgrad, a C library that is compiled from the sources of this package.
#
#     find_package(convgrad CONFIG REQUIRED)      # -Dconvgrad_ROOT="$(convgrad config --cmakedir)"
#     target_link_libraries(program PRIVATE convgrad::convgrad)
#
# The project needs the languages C and CXX. TVM's libraries and headers are those of the Python packages apache-tvm and
# apache-tvm-ffi; of another place, name CONVGRAD_TVM_LIBRARY (libtvm_runtime.so), CONVGRAD_TVM_FFI_LIBRARY
# (libtvm_ffi.so), CONVGRAD_TVM_FFI_INCLUDE and CONVGRAD_TVM_VERSION, such as those of a bundle for another machine.
if(TARGET convgrad::convgrad)
  return()
endif()

get_filename_component(_convgrad_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

set(_convgrad_names TVM_LIBRARY TVM_FFI_LIBRARY TVM_FFI_INCLUDE TVM_VERSION)
foreach(_convgrad_name IN LISTS _convgrad_names)
  if(NOT CONVGRAD_${_convgrad_name})
    if(NOT _convgrad_said)
      find_package(Python COMPONENTS Interpreter REQUIRED)
      execute_process(COMMAND "${Python_EXECUTABLE}" -m tvm_convgrad config OUTPUT_VARIABLE _convgrad_said
                      RESULT_VARIABLE _convgrad_code ERROR_VARIABLE _convgrad_error)
    endif()
    string(TOLOWER "${_convgrad_name}" _convgrad_key)
    string(REPLACE "_" "-" _convgrad_key "${_convgrad_key}")
    if(NOT "\n${_convgrad_said}" MATCHES "\n${_convgrad_key} ([^\n]+)")
      message(FATAL_ERROR "convgrad: CONVGRAD_${_convgrad_name} is not set, and `${Python_EXECUTABLE} -m tvm_convgrad "
                          "config` does not say it: ${_convgrad_error}")
    endif()
    set(CONVGRAD_${_convgrad_name} "${CMAKE_MATCH_1}")
  endif()
endforeach()

file(GLOB _convgrad_sources "${_convgrad_root}/src/*.cc")
add_library(convgrad SHARED ${_convgrad_sources})
add_library(convgrad::convgrad ALIAS convgrad)
target_compile_features(convgrad PRIVATE cxx_std_17)
target_compile_definitions(convgrad PRIVATE CONVGRAD_TVM_VERSION="${CONVGRAD_TVM_VERSION}")
target_include_directories(convgrad PUBLIC "${_convgrad_root}/include" PRIVATE "${_convgrad_root}/src")
target_include_directories(convgrad SYSTEM PRIVATE ${CONVGRAD_TVM_FFI_INCLUDE})
set_target_properties(convgrad PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                                          POSITION_INDEPENDENT_CODE ON)
# libtvm_runtime is needed for what it registers when it is loaded, not for a symbol: the linker must not drop it.
target_link_libraries(convgrad PRIVATE "-Wl,--no-as-needed" "${CONVGRAD_TVM_LIBRARY}" "${CONVGRAD_TVM_FFI_LIBRARY}"
                                       "-Wl,--as-needed"
                                       "-Wl,--version-script,${_convgrad_root}/src/exports.map")
