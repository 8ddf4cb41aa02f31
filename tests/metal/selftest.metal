// Tiny kernels for test_runtime.cpp: what each simd function gives, and one broken kernel for each rule.

#include <metal_stdlib>

using namespace metal;

constant int FC_value [[function_constant(7)]];

// ---------------------------------------------------------------- every simd function, over lanes 0..31

kernel void simd_functions(
        device int * out,
        ushort lane[[thread_index_in_simdgroup]]) {
    const int v = lane;
    int n = 0;
    out[32*n++ + lane] = simd_sum(v);
    out[32*n++ + lane] = simd_product(lane < 4 ? v + 1 : 1);
    out[32*n++ + lane] = simd_min(v + 3);
    out[32*n++ + lane] = simd_max(v);
    out[32*n++ + lane] = simd_and(v | 64);
    out[32*n++ + lane] = simd_or(v);
    out[32*n++ + lane] = simd_xor(v*v);
    out[32*n++ + lane] = simd_any(v == 31);
    out[32*n++ + lane] = simd_all(v < 31);
    out[32*n++ + lane] = simd_prefix_inclusive_sum(v);
    out[32*n++ + lane] = simd_prefix_exclusive_sum(v);
    out[32*n++ + lane] = simd_shuffle(v, (v + 5) % 32);
    out[32*n++ + lane] = simd_broadcast(v, 9);
    out[32*n++ + lane] = simd_shuffle_down(v, 3);
    out[32*n++ + lane] = simd_shuffle_up(v, 3);
    out[32*n++ + lane] = simd_shuffle_xor(v, 6);
}

// c = a*b + c, loaded transposed from a
kernel void matrices(
        device const float * a,
        device const float * b,
        device       float * c) {
    simdgroup_float8x8 ma, mb, mc = make_filled_simdgroup_matrix<float, 8>(1.0f);
    simdgroup_load(ma, a, 8, ulong2(0), true);
    simdgroup_load(mb, b, 8);
    simdgroup_multiply_accumulate(mc, ma, mb, mc);
    simdgroup_store(mc, c, 8);
    simdgroup_store(mc, c + 64, 12, ulong2(2, 1), true);
    simdgroup_multiply(mc, ma, mb);
    simdgroup_store(mc, c + 192, 8);
}

template<typename T>
kernel void positions(
        device uint * out,
        constant int & add [[buffer(3)]],
        T tgpig[[threadgroup_position_in_grid]],
        T tpitg[[thread_position_in_threadgroup]],
        T   ntg[[threads_per_threadgroup]],
        T  tpig[[thread_position_in_grid]],
        uint index[[thread_index_in_threadgroup]],
        ushort sg[[simdgroup_index_in_threadgroup]],
        ushort nsg[[simdgroups_per_threadgroup]]) {
    device uint * o = out + 8*((tgpig.z*2 + tgpig.y)*3 + tgpig.x);
    if (index == 40) {
        o[0] = tpitg.x; o[1] = tpitg.y; o[2] = ntg.x; o[3] = tpig.x; o[4] = tpig.z; o[5] = sg; o[6] = nsg; o[7] = FC_value + add;
    }
}
template [[host_name("positions_3")]] kernel void positions<uint3>(device uint *, constant int &, uint3, uint3, uint3, uint3, uint, ushort, ushort);

kernel void count_atomically(device atomic_int * n) {
    atomic_fetch_add_explicit(n, 2, memory_order_relaxed);
}

// a GPU does not trap on a division by zero
kernel void divide_by_zero(device const int * in, device int * out, uint i[[thread_index_in_threadgroup]]) {
    const int quotient = 7%in[i] + 7/in[i + 32];
    out[i] = in[i] == 0 || in[i + 32] == 0 ? 1 : quotient;
}

// ---------------------------------------------------------------- neighbours exchange values through memory

kernel void exchange_threadgroup(
        device float * out,
        uint i[[thread_index_in_threadgroup]],
        uint n[[threads_per_threadgroup]]) {
    threadgroup float shared[128];
    shared[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[(i + 1) % n];
}

kernel void exchange_threadgroup_without_barrier(
        device float * out,
        threadgroup float * shared [[threadgroup(0)]],
        uint i[[thread_index_in_threadgroup]],
        uint n[[threads_per_threadgroup]]) {
    shared[i] = i;
    out[i] = shared[n - 1 - i];
}

kernel void exchange_threadgroup_wrong_flag(
        device float * out,
        threadgroup float * shared [[threadgroup(0)]],
        uint i[[thread_index_in_threadgroup]],
        uint n[[threads_per_threadgroup]]) {
    shared[i] = i;
    threadgroup_barrier(mem_flags::mem_device);
    out[i] = shared[n - 1 - i];
}

kernel void exchange_threadgroup_simdgroup_barrier(
        device float * out,
        threadgroup float * shared [[threadgroup(0)]],
        uint i[[thread_index_in_threadgroup]],
        uint n[[threads_per_threadgroup]]) {
    shared[i] = i;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[n - 1 - i];
}

kernel void exchange_simdgroup(
        device float * out,
        threadgroup float * shared [[threadgroup(0)]],
        uint i[[thread_index_in_threadgroup]]) {
    shared[i] = i;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[i ^ 1];
}

kernel void exchange_simdgroup_without_barrier(
        device float * out,
        threadgroup float * shared [[threadgroup(0)]],
        uint i[[thread_index_in_threadgroup]]) {
    shared[i] = i;
    out[i] = shared[i ^ 1];
}

kernel void exchange_device(
        device float * out,
        uint i[[thread_index_in_threadgroup]],
        uint n[[threads_per_threadgroup]]) {
    out[i] = i;
    threadgroup_barrier(mem_flags::mem_device);
    out[n + i] = out[n - 1 - i];
}

kernel void exchange_device_wrong_flag(
        device float * out,
        uint i[[thread_index_in_threadgroup]],
        uint n[[threads_per_threadgroup]]) {
    out[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[n + i] = out[n - 1 - i];
}

// ---------------------------------------------------------------- broken otherwise

kernel void read_then_write(device float * out, uint i[[thread_index_in_threadgroup]]) {
    const float v = out[(i + 1) % 32];
    out[i] = v;
}

kernel void write_by_all(device float * out, uint i[[thread_index_in_threadgroup]]) {
    out[0] = i;
}

kernel void share_between_threadgroups(
        device float * out,
        uint g[[threadgroup_position_in_grid]],
        uint i[[thread_index_in_threadgroup]]) {
    if (i == 0) {
        out[g/2] = g;
    }
}

kernel void read_past_end(device const float * in, device float * out, uint i[[thread_index_in_threadgroup]]) {
    out[i] = in[i + 1];
}

kernel void read_far_away(device const float * in, device float * out, uint i[[thread_index_in_threadgroup]]) {
    out[i] = in[i + 100000000];
}

kernel void write_across_end(device float * out, uint i[[thread_index_in_threadgroup]]) {
    if (i == 0) {
        *(device float2 *) (out + 31) = float2(1.0f);
    }
}

kernel void read_unwritten(
        device float * out,
        threadgroup float * shared [[threadgroup(0)]],
        uint i[[thread_index_in_threadgroup]]) {
    out[i] = shared[i];
}

kernel void too_many_arrays(device float * out, uint i[[thread_index_in_threadgroup]]) {
    threadgroup float a[4096];
    threadgroup float b[4097];
    a[i] = 1.0f;
    b[i] = 2.0f;
    out[i] = a[i] + b[i];
}

kernel void past_array(device float * out, uint i[[thread_index_in_threadgroup]]) {
    threadgroup float a[32];
    threadgroup float b[32];
    a[i + 1] = 1.0f;
    b[i] = 2.0f;
    out[i] = a[i + 1] + b[i];
}

kernel void divergent_sum(device float * out, uint i[[thread_index_in_threadgroup]]) {
    float v = i;
    if (i < 16) {
        v = simd_sum(v);
    }
    out[i] = v;
}

kernel void divergent_barrier(device float * out, uint i[[thread_index_in_threadgroup]]) {
    if (i < 32) {
        threadgroup_barrier(mem_flags::mem_none);
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    out[i] = i;
}

kernel void return_before_barrier(device float * out, uint i[[thread_index_in_threadgroup]]) {
    if (i >= 32) {
        return;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = i;
}

kernel void matrix_without_barrier(
        device const float * a,
        device       float * out,
        threadgroup  float * shared [[threadgroup(0)]],
        uint i[[thread_index_in_threadgroup]]) {
    simdgroup_float8x8 m;
    simdgroup_load(m, a, 8);
    simdgroup_store(m, shared, 8);
    out[i] = shared[i];
}

kernel void different_matrices(device const float * a, device float * out, ushort lane[[thread_index_in_simdgroup]]) {
    simdgroup_float8x8 m;
    simdgroup_load(m, a + (lane == 5 ? 64 : 0), 8);
    simdgroup_store(m, out, 8);
}
