// The runtime and the memory checker themselves: each simd function gives the right values, each broken kernel of
// selftest.metal is caught with the right message, and the correct ones are not.

#include "runtime.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

using namespace msl;

static int n_checks = 0, n_failures = 0;

static void check(bool ok, const std::string & what) {
    n_checks++;
    if (!ok) {
        n_failures++;
        printf("FAIL %s\n", what.c_str());
    }
}

struct Run {
    std::string kernel;
    uint32_t    threads     = 32;
    dim3        grid        = { 1, 1, 1 };
    size_t      threadgroup = 0;   // bytes
};

static std::string run(const Run & r, std::vector<binding> buffers, order schedule = order::in_order, uint64_t seed = 1) {
    bindings b;
    for (size_t i = 0; i < buffers.size(); i++) {
        b.buffers[i] = buffers[i];
    }
    options o;
    o.schedule = schedule;
    o.seed     = seed;
    return dispatch({ find_kernel(r.kernel), { { 7, 40 } } }, b, r.grid, { r.threads, 1, 1 }, r.threadgroup ? std::vector<size_t> { r.threadgroup } : std::vector<size_t> {}, o);
}

template<class T> static binding whole(std::vector<T> & v) { return { v.data(), v.size()*sizeof(T) }; }

static const order schedules[] = { order::in_order, order::reverse, order::random };

// ---------------------------------------------------------------- values

static void test_simd_functions() {
    std::vector<std::function<int(int)>> expected = {
        [](int) { return 496; }, [](int) { return 24; }, [](int) { return 3; }, [](int) { return 31; },
        [](int) { return 64; }, [](int) { return 31; },
        [](int) { int x = 0; for (int i = 0; i < 32; i++) { x ^= i*i; } return x; },
        [](int) { return 1; }, [](int) { return 0; },
        [](int i) { return i*(i + 1)/2; }, [](int i) { return i*(i - 1)/2; },
        [](int i) { return (i + 5) % 32; }, [](int) { return 9; },
        [](int i) { return i + 3 < 32 ? i + 3 : i; }, [](int i) { return i >= 3 ? i - 3 : i; }, [](int i) { return i ^ 6; },
    };
    for (order o : schedules) {
        std::vector<int> out(32*expected.size(), -1);
        check(run({ "simd_functions" }, { whole(out) }, o, 5) == "", "simd_functions runs");
        for (size_t f = 0; f < expected.size(); f++) {
            for (int lane = 0; lane < 32; lane++) {
                check(out[32*f + lane] == expected[f](lane), "simd function " + std::to_string(f) + ", lane " + std::to_string(lane));
            }
        }
    }
}

static void test_matrices() {
    std::vector<float> a(64), b(64), c(256, NAN);
    for (int i = 0; i < 64; i++) {
        a[i] = (float) (i % 7);
        b[i] = (float) (i % 5 - 2);
    }
    check(run({ "matrices" }, { whole(a), whole(b), whole(c) }) == "", "matrices runs");
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) {
            float sum = 1;
            for (int k = 0; k < 8; k++) {
                sum += a[k*8 + i]*b[k*8 + j];
            }
            check(c[i*8 + j] == sum, "matrix product");
            check(c[64 + (j + 1)*12 + i + 2] == sum, "matrix product, stored transposed at an origin");
            check(c[192 + i*8 + j] == sum - 1, "matrix product without a sum");
        }
    }
    check(std::isnan(c[64 + 11]) && std::isnan(c[64 + 12 + 10]), "a store writes its 64 elements only");
}

static void test_positions() {
    std::vector<uint32_t> out(8*12, 99);
    int add = 2;
    check(run({ "positions_3", 70, { 3, 2, 2 } }, { whole(out), {}, {}, { &add, sizeof(add) } }) == "", "positions runs");
    const uint32_t expected[] = { 40, 0, 70, 2*70 + 40, 1, 1, 3, 42 };
    check(memcmp(&out[8*11], expected, sizeof(expected)) == 0, "positions of a thread");
}

static void test_atomics() {
    std::vector<int> n = { 0 };
    check(run({ "count_atomically", 64, { 3, 1, 1 } }, { whole(n) }) == "" && n[0] == 384, "atomics add up and are no race");
}

static void test_division_by_zero() {
    std::vector<int> in(64, 3), out(32, 99);
    in[0] = in[33] = 0;
    check(run({ "divide_by_zero" }, { whole(in), whole(out) }) == "" && out[0] == 1 && out[1] == 1 && out[2] == 3, "a division by zero does not trap");
}

static void test_correct_exchanges() {
    for (order o : schedules) {
        std::vector<float> out(128, NAN);
        check(run({ "exchange_threadgroup", 128, { 1, 1, 1 } }, { whole(out) }, o) == "" && out[127] == 0 && out[3] == 4, "exchange_threadgroup");
        check(run({ "exchange_simdgroup", 64, { 1, 1, 1 }, 256 }, { whole(out) }, o) == "" && out[6] == 7, "exchange_simdgroup");
        check(run({ "exchange_device", 64 }, { whole(out) }, o) == "" && out[64] == 63, "exchange_device");
    }
}

// ---------------------------------------------------------------- violations

static void test_violations() {
    std::vector<float> in(32, 1), out(128);
    const std::vector<binding> only_out = { whole(out) }, in_out = { whole(in), { out.data(), 32*4 } }, short_out = { { out.data(), 32*4 } };
    struct Case { Run run; std::vector<binding> buffers; const char * message; };
    // without a barrier it depends on the order of threads whether a value was not yet or not safely written
    const std::vector<Case> cases = {
        { { "exchange_threadgroup_without_barrier",   64, { 1, 1, 1 }, 256 }, only_out, "threadgroup memory" },
        { { "exchange_threadgroup_wrong_flag",        64, { 1, 1, 1 }, 256 }, only_out, "write/read race in threadgroup memory" },
        { { "exchange_threadgroup_simdgroup_barrier", 64, { 1, 1, 1 }, 256 }, only_out, "threadgroup memory" },
        { { "exchange_simdgroup_without_barrier",     32, { 1, 1, 1 }, 128 }, only_out, "threadgroup memory" },
        { { "exchange_device_wrong_flag",             64 },                   only_out, "write/read race in device memory" },
        { { "read_then_write",                        32 },                   only_out, "race in device memory" },
        { { "write_by_all",                           32 },                   only_out, "write/write race in device memory" },
        { { "share_between_threadgroups",             32, { 4, 1, 1 } },      only_out, "write/write race in device memory" },
        { { "read_past_end",                          32 },                   in_out,   "read of 4 bytes outside of all buffers" },
        { { "read_far_away",                          32 },                   in_out,   "read of 4 bytes outside of all buffers" },
        { { "write_across_end",                       32 },                   short_out, "write of" },
        { { "read_unwritten",                         32, { 1, 1, 1 }, 128 }, only_out, "unwritten threadgroup memory is read" },
        { { "too_many_arrays",                        32 },                   only_out, "threadgroup arrays of the kernel need" },
        { { "past_array",                             32 },                   only_out, "write of 4 bytes outside of all buffers" },
        { { "divergent_sum",                          32 },                   only_out, "divergence in simdgroup 0" },
        { { "divergent_barrier",                      64 },                   only_out, "threads wait at different barriers" },
        { { "return_before_barrier",                  64 },                   only_out, "32 threads returned before the barrier" },
        { { "matrix_without_barrier",                 32, { 1, 1, 1 }, 256 }, { whole(out), whole(out) }, "write/read race in threadgroup memory" },
        { { "different_matrices",                     32 },                   { whole(out), whole(out) }, "lanes pass different operands" },
        { { "read_unwritten",                         32, { 1, 1, 1 }, 40000 }, only_out, "bytes of threadgroup memory" },
        { { "read_unwritten",                         32, { 1, 1, 1 }, 100 },  only_out, "no multiple of 16" },
        { { "write_by_all",                           1025 },                 only_out, "1025 threads in a threadgroup" },
        { { "write_by_all",                           32, { 0, 1, 1 } },      only_out, "an empty grid" },
        { { "read_past_end",                          32 },                   only_out, "buffer 1 is not set" },
        { { "no_such_kernel" },                                               only_out, "no such kernel" },
    };
    for (const Case & c : cases) {
        for (order o : schedules) {
            const std::string error = run(c.run, c.buffers, o, 3);
            check(error.find(c.message) != std::string::npos, c.run.kernel + ": expected '" + c.message + "', got '" + error + "'");
        }
    }
    // a message names the line of the .metal file
    const std::string error = run({ "read_unwritten", 32, { 1, 1, 1 }, 128 }, only_out);
    check(error.find("selftest.metal:") != std::string::npos, "a violation names its line: " + error);
}

static void test_counters() {
    std::vector<float> out(128, 0);
    bindings b;
    b.buffers[0] = whole(out);
    counters n;
    check(dispatch({ find_kernel("exchange_device"), {} }, b, { 1, 1, 1 }, { 64, 1, 1 }, {}, {}, &n) == "", "exchange_device");
    check(n.threadgroups == 1 && n.threadgroup_barriers == 1 && n.simdgroup_operations == 0, "counts of barriers");
    check(last_traffic.size() == 1 && last_traffic[0].unique_read == 256 && last_traffic[0].unique_written == 512, "counts of bytes");
}

int main() {
    test_simd_functions();
    test_matrices();
    test_positions();
    test_atomics();
    test_division_by_zero();
    test_correct_exchanges();
    test_violations();
    test_counters();
    printf("metal_runtime: %d checks, %d failures\n", n_checks, n_failures);
    return n_failures != 0;
}
