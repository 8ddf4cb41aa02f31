# Mistakes that the tests have to catch: each is a copy of a source with one thing wrong, built with the memory checker
# and run by expect_caught.py, which asks for a message that says what is wrong.
#
# metal_mutant(NAME SOURCE OLD NEW MESSAGE ARGUMENTS...)      ARGUMENTS: parts of test_tree_ops to run; '\\n' in OLD and
# NEW is a line break

function(metal_mutant name source old new message)
    set(mutant "mutant_${name}")
    set(copy "${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}/${source}")
    get_filename_component(stem "${source}" NAME_WE)
    get_filename_component(dir "${copy}" DIRECTORY)
    file(MAKE_DIRECTORY "${dir}")
    add_custom_command(
        OUTPUT "${copy}"
        COMMAND Python3::Interpreter "${CMAKE_CURRENT_SOURCE_DIR}/mutate.py" "${METAL}/${source}" "${copy}" "${old}" "${new}"
        DEPENDS "${METAL}/${source}" mutate.py
        VERBATIM)

    set(parts metal_fake metal_rest msl_checker)
    if(source MATCHES "[.]metal$")
        msl_kernels(${mutant}_part CHECKED "${copy}" ${KERNEL_INCLUDES})
        list(APPEND parts metal_ops metal_common)
        set(others ${KERNEL_STEMS})
        list(REMOVE_ITEM others ${stem})
    else()
        metal_part(${mutant}_part "${copy}")
        list(APPEND parts metal_ops metal_common)
        string(REPLACE "ggml-metal-" "metal_" replaced "${stem}")
        list(REMOVE_ITEM parts ${replaced})
        set(others ${KERNEL_STEMS})
    endif()
    foreach(other ${others})
        list(APPEND parts kernels_checked_${other})
    endforeach()
    metal_program(${mutant} WITH test_tree_ops ${mutant}_part ${parts})

    set(environment)
    if(NOT source MATCHES "[.]metal$")
        set(environment MSL_ORDER=reverse)
    endif()
    metal_test(mutant-${name}
        Python3::Interpreter "${CMAKE_CURRENT_SOURCE_DIR}/expect_caught.py" "${message}" $<TARGET_FILE:${mutant}> ${ARGN}
        ENVIRONMENT ${environment})
endfunction()

set(GDN  kernels/gated_delta_net_tree.metal)
set(CONV kernels/ssm_conv_tree.metal)
set(OPS  ggml-metal-ops.cpp)

# --- arithmetic and indexing of the delta rule -------------------------------------------------

metal_mutant(gdn-no-sum-of-sk ${GDN} "s_k = simd_sum(s_k);" "" "output differs at" quick)
metal_mutant(gdn-no-sum-of-y  ${GDN} "y = simd_sum(y);" "" "output differs at" quick)
metal_mutant(gdn-wrong-stride ${GDN} "v_base + n*args.nb22);" "v_base + n*args.nb21);" "output differs at" quick)
metal_mutant(gdn-wrong-head   ${GDN} "const int i11 = i21%args.H_k;        //" "const int i11 = i21*args.H_k/args.H_v; //" "output differs at" quick)
metal_mutant(gdn-no-scale     ${GDN} "= y*scale;" "= y;" "output differs at" quick)
metal_mutant(gdn-skipped-decay ${GDN} "gdn_tree_decay <NPT>(ls + r*NPT, tape_g + n*G);" "" "gdn_state differs at" quick)
metal_mutant(gdn-path-off-by-one ${GDN} "tree[OP_TREE_PATH + i]" "tree[OP_TREE_PATH + MAX(0, i - 1)]" "gdn_state differs at" quick)
metal_mutant(gdn-parents-as-path ${GDN} "tree + OP_TREE_PATH + args.n_max, N" "tree + OP_TREE_PATH + args.n_max - 1, N" "output differs at|unwritten|outside" quick)
metal_mutant(gdn-tape-shifted ${GDN} "(ih*args.n_max + n)*G + is] = precise::exp" "(ih*args.n_nodes + n)*G + is] = precise::exp" "tape differs at" quick)

# --- kept states ---------------------------------------------------------------------------------

metal_mutant(gdn-swapped-slot   ${GDN} "slot + (is_last[h] ? 1 : 0)" "slot + (is_last[h] ? 0 : 1)" "output differs at|unwritten threadgroup memory" quick)
metal_mutant(gdn-largest-first  ${GDN} "plan->size[j] < plan->size[i]" "plan->size[j] > plan->size[i]" "outside of all buffers" quick)
metal_mutant(gdn-one-slot-short ${GDN} "#define GDN_TREE_MAX_KEPT  5" "#define GDN_TREE_MAX_KEPT  4" "outside of all buffers" quick)
metal_mutant(gdn-shared-slots   ${GDN} "kept + sgitg*S + is0" "kept + is0" "race in threadgroup memory" quick)

# --- synchronisation -----------------------------------------------------------------------------

set(PLAN "// the plan is there, and all lanes have read the old d\\n    threadgroup_barrier(")
metal_mutant(gdn-no-threadgroup-barrier ${GDN}
    "${PLAN}mem_flags::mem_threadgroup | mem_flags::mem_device);" "//"
    "unwritten threadgroup memory|race in (threadgroup|device) memory" quick)
metal_mutant(gdn-barrier-without-device ${GDN} "${PLAN}mem_flags::mem_threadgroup | mem_flags::mem_device" "${PLAN}mem_flags::mem_threadgroup"
    "read/write race in device memory" quick)
metal_mutant(gdn-barrier-without-threadgroup ${GDN} "${PLAN}mem_flags::mem_threadgroup | mem_flags::mem_device" "${PLAN}mem_flags::mem_device"
    "race in threadgroup memory" quick)
metal_mutant(gdn-no-simdgroup-barrier ${GDN}
    "    simdgroup_barrier(mem_flags::mem_threadgroup);\\n\\n    // unions of paths" "    // unions of paths"
    "unwritten threadgroup memory|race in threadgroup memory" quick)
metal_mutant(gdn-no-simdgroup-barrier-2 ${GDN}
    "    simdgroup_barrier(mem_flags::mem_threadgroup);\\n\\n    bool is_first[2];" "    bool is_first[2];"
    "unwritten threadgroup memory|race in threadgroup memory" quick)
metal_mutant(gdn-sum-by-half-a-simdgroup ${GDN} "y = simd_sum(y);" "if (tiisg < 16) { y = simd_sum(y); }" "divergence in simdgroup" quick)
metal_mutant(gdn-all-lanes-write ${GDN} "if (tiisg == 0) {\\n            o_base" "{\\n            o_base" "write/write race in device memory" quick)

# --- chunk form ------------------------------------------------------------------------------------

metal_mutant(chunk-skipped-decay ${GDN} "decay = decay*precise::exp(g_m[0]);" "" "output differs at" quick-chunk)
metal_mutant(chunk-added-innovations ${GDN} "c_d[h] = -decay*k_k;" "c_d[h] = decay*k_k;" "output differs at" quick-chunk)
metal_mutant(chunk-no-ancestors ${GDN} "m >= 0; m = parents[m]" "m >= 0; m = m - 1" "output differs at" quick-chunk)
metal_mutant(chunk-not-transposed ${GDN} "tile + c*8*S + i*8, S, 0, true" "tile + c*8*S + i*8, S, 0, false" "output differs at" quick-chunk)
metal_mutant(chunk-wrong-columns ${GDN} "GDN_TREE_ROWS + sgitg*NR, GDN_TREE_ROWS" "GDN_TREE_ROWS + sgitg, GDN_TREE_ROWS"
    "race in threadgroup memory" quick-chunk)
metal_mutant(chunk-no-zeros ${GDN} "if (n < N) {" "{" "outside of all buffers" quick-chunk)
metal_mutant(chunk-coefficients-of-d ${GDN} "pairs[(N + n)*N + m];" "pairs[n*N + m];" "output differs at" quick-chunk)
metal_mutant(chunk-no-barrier-before-tile ${GDN}
    "were loaded\\n        threadgroup_barrier(mem_flags::mem_threadgroup);" "" "race in threadgroup memory" quick-chunk)
metal_mutant(chunk-no-barrier-behind-tile ${GDN}
    "        threadgroup_barrier(mem_flags::mem_threadgroup);\\n\\n        FOR_UNROLL (short c" "        FOR_UNROLL (short c"
    "unwritten threadgroup memory|race in threadgroup memory" quick-chunk)
metal_mutant(chunk-no-simdgroup-barrier ${GDN}
    "    simdgroup_barrier(mem_flags::mem_threadgroup);\\n\\n    simdgroup_float8x8 ms" "    simdgroup_float8x8 ms"
    "unwritten threadgroup memory|race in threadgroup memory" quick-chunk)
metal_mutant(chunk-barrier-without-device ${GDN}
    "was loaded, and all lanes have read the old d\\n    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device"
    "\\n    threadgroup_barrier(mem_flags::mem_threadgroup" "read/write race in device memory" quick-chunk)
metal_mutant(chunk-no-barrier-before-outputs ${GDN}
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\\n\\n    const float scale" "    const float scale"
    "race in threadgroup memory" quick-chunk)

# --- the convolution -------------------------------------------------------------------------------

metal_mutant(conv-wrong-weight ${CONV} "c[j - n_anc]" "c[j]" "output differs at" conv)
metal_mutant(conv-no-ancestors ${CONV} "p = parents[p];\\n            }" "p = p - 1;\\n            }" "output differs at" conv)
metal_mutant(conv-window-off-by-one ${CONV} "i < n_keep ?" "i <= n_keep ?" "conv_state differs at|outside" conv)
metal_mutant(conv-tape-stride ${CONV} "tp[i*args.n_ch] = xi;" "tp[i*args.n_nodes] = xi;" "race in device memory|tape differs at" conv)

# --- the host side: dispatches in reverse order between two barriers ----------------------------

metal_mutant(host-wrong-grid   ${OPS} "args.S/nsg, args.H_v, n_seqs" "args.S/nsg, args.H_k, n_seqs" "output differs at" quick)
metal_mutant(host-wrong-buffer ${OPS} "ggml_metal_get_buffer_id(beta),  5)" "ggml_metal_get_buffer_id(g),  5)" "output differs at" quick)
metal_mutant(host-chunk-grid ${OPS} "args.S/32, args.H_v, n_seqs, 32*4" "args.S/32, args.H_k, n_seqs, 32*4" "output differs at" quick-chunk)
metal_mutant(host-short-coefficients ${OPS} "sizeof(float)*op->ne[3]*op->ne[1]*" "sizeof(float)*op->ne[1]*" "outside of all buffers|crosses the end" quick-chunk)
metal_mutant(host-no-barrier-before-chunk ${OPS} "// the coefficients are read next\\n        ggml_metal_op_concurrency_reset(ctx);" ""
    "output differs at" quick-chunk)
metal_mutant(host-no-barrier-before-tape ${OPS}
    "    ggml_metal_op_concurrency_reset(ctx);\\n\\n    {\\n        auto pipeline = ggml_metal_library_get_pipeline_gated_delta_net_tree_tape"
    "    {\\n        auto pipeline = ggml_metal_library_get_pipeline_gated_delta_net_tree_tape"
    "gdn_state differs at" quick)
metal_mutant(host-written-state-unknown ggml-metal-common.cpp "return i_src == 5 || i_src == 6;" "return false;" "order-node[0-9]+: value differs at" order)
metal_mutant(host-written-window-unknown ggml-metal-common.cpp "return i_src == 1 || i_src == 2;" "return false;" "order-node[0-9]+: value differs at" order)
