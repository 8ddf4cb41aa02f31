# C++ tests: `cmake --build <build> --target pyspec-tests`, then `ctest --test-dir <build>`.
#
#   -L unit          tests/ctest/test_*.cpp, one program a file
#   -L backend-ops   upstream's test-backend-ops, one test an operator of PYSPEC_OPS
#   -L metal         the Metal kernels, executed on the CPU (Linux): tests/metal

# The operators that the patches change or add; a patch that adds one appends it here.
set(PYSPEC_OPS
    SSM_CONV SSM_CONV_TREE SSM_CONV_REPLAY
    GATED_DELTA_NET GATED_DELTA_NET_TREE GATED_DELTA_NET_REPLAY
    ARGMAX)

add_custom_target(pyspec-tests)

function(pyspec_test_program target)
    add_executable(${target} EXCLUDE_FROM_ALL ${ARGN})
    set_target_properties(${target} PROPERTIES
        RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests"
        BUILD_WITH_INSTALL_RPATH ON
        INSTALL_RPATH "${origin}/../pyspec/lib")
    target_include_directories(${target} SYSTEM PRIVATE "${LLAMA_SRC}/src")
    target_compile_options(${target} PRIVATE ${sanitizer_flags})
    target_link_libraries(${target} PRIVATE llama ggml)
    add_dependencies(pyspec-tests ${target})
endfunction()

set(sanitizer_options
    "ASAN_OPTIONS=detect_stack_use_after_return=1"
    "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1")

file(GLOB test_sources CONFIGURE_DEPENDS "${REPO}/tests/ctest/test_*.cpp")
foreach(source ${test_sources})
    get_filename_component(name "${source}" NAME_WE)
    pyspec_test_program(${name} "${source}")
    target_include_directories(${name} PRIVATE "${NATIVE}/src")
    target_compile_options(${name} PRIVATE -Wall -Wextra -UNDEBUG)
    if(TARGET pyspec)
        target_link_libraries(${name} PRIVATE pyspec)
    endif()
    # They run in the repository, so that a test names a model as tests/... or pyspec/...
    set(arguments)
    if(PYSPEC_SANITIZE AND name STREQUAL "test_gated_delta_net_tree")
        set(arguments quick) # all of it takes a quarter of an hour with sanitizers
    endif()
    add_test(NAME ${name} COMMAND ${name} ${arguments} WORKING_DIRECTORY "${REPO}")
    set_tests_properties(${name} PROPERTIES
        LABELS unit TIMEOUT 900 ENVIRONMENT "${sanitizer_options}")
endforeach()

# Not with sanitizers: minutes to compile, for operators that the unit tests cover.
if(EXISTS "${LLAMA_SRC}/tests/test-backend-ops.cpp" AND NOT PYSPEC_SANITIZE)
    pyspec_test_program(test-backend-ops "${LLAMA_SRC}/tests/test-backend-ops.cpp")
    foreach(op ${PYSPEC_OPS})
        add_test(NAME ops-${op} COMMAND test-backend-ops test -b CPU -o ${op})
        set_tests_properties(ops-${op} PROPERTIES
            LABELS backend-ops TIMEOUT 900 ENVIRONMENT "${sanitizer_options}")
    endforeach()
    # of the thousands of its cases those that flash_attn_ordered adds
    add_test(NAME ops-FLASH_ATTN_EXT COMMAND test-backend-ops test -b CPU -o FLASH_ATTN_EXT -p ordered=1)
    set_tests_properties(ops-FLASH_ATTN_EXT PROPERTIES LABELS backend-ops TIMEOUT 900)
endif()

# Not with sanitizers either: the Metal kernels have a memory checker of their own.
if(NOT PYSPEC_SANITIZE)
    add_subdirectory("${REPO}/tests/metal" metal EXCLUDE_FROM_ALL)
    if(TARGET metal-tests)
        add_dependencies(pyspec-tests metal-tests)
    endif()
endif()
