# msl_kernels(NAME [CHECKED] [LINES_OF DIR] FILE.metal...)
#
# An object library with the kernels of .metal files, found by msl::find_kernel. CHECKED compiles them for the memory
# checker (msl_checker). A file is preprocessed as the Metal compiler would, generate.py turns the result into C++.

set(MSL_DIR "${CMAKE_CURRENT_LIST_DIR}/msl")

function(msl_kernels name)
    cmake_parse_arguments(arg "CHECKED" "" "INCLUDES" ${ARGN})
    set(includes)
    foreach(dir ${arg_INCLUDES})
        list(APPEND includes "-I${dir}")
    endforeach()
    set(sources)
    foreach(file ${arg_UNPARSED_ARGUMENTS})
        get_filename_component(stem "${file}" NAME_WE)
        set(out "${CMAKE_CURRENT_BINARY_DIR}/${name}/${stem}")
        file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/${name}")
        add_custom_command(
            OUTPUT "${out}.cpp"
            COMMAND "${CMAKE_CXX_COMPILER}" -E -x c++ -std=c++17 -D__METAL_VERSION__=310 -nostdinc
                    "-I${MSL_DIR}/empty" ${includes} -MD -MT "${out}.cpp" -MF "${out}.d" "${file}" -o "${out}.i"
            COMMAND Python3::Interpreter "${MSL_DIR}/generate.py" "${out}.i" "${out}.cpp" "${stem}.metal"
            DEPENDS "${file}" "${MSL_DIR}/generate.py"
            DEPFILE "${out}.d"
            VERBATIM)
        list(APPEND sources "${out}.cpp")
    endforeach()
    add_library(${name} OBJECT EXCLUDE_FROM_ALL ${sources})
    target_include_directories(${name} PRIVATE "${MSL_DIR}")
    # No contraction: fma is explicit in the kernels, and the rest has to round as written.
    target_compile_options(${name} PRIVATE -ffp-contract=off -Wno-unknown-pragmas -Wno-attributes -Wno-psabi)
    # -g1: a violation names its line
    target_compile_options(${name} PRIVATE $<IF:$<BOOL:${arg_CHECKED}>,-O1;-g1;-fsanitize=thread,-O2>)
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        target_compile_options(${name} PRIVATE -mf16c -mfma)
    endif()
endfunction()
