// ggml_argmax on the CPU: of equal maxima the first, NaN passed over, whatever the threads.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

static std::vector<int32_t> argmax(const std::vector<float> & x, int n, int rows, int n_threads) {
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead()*4 + ggml_graph_overhead(), nullptr, true });
    ggml_tensor *  in  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, rows);
    ggml_tensor *  out = ggml_argmax(ctx, in);
    ggml_cgraph *  gf  = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    ggml_backend_tensor_set(in, x.data(), 0, ggml_nbytes(in));
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, n_threads);
    ggml_backend_graph_compute(cpu, gf);
    std::vector<int32_t> result(rows);
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_free(cpu);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

static int32_t expected(const float * x, int n) {
    int32_t best = -1;
    for (int i = 0; i < n; ++i) {
        if (!std::isnan(x[i]) && (best < 0 || x[i] > x[best])) {
            best = i;
        }
    }
    return std::max(best, 0);
}

int main() {
    const float  nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    std::mt19937 random(1);
    int          n_failed = 0;
    for (int n : { 1, 2, 63, 64, 65, 1023, 1024, 1025, 3000, 5000 }) {
        for (int rows : { 1, 3, 16 }) {
            for (int levels : { 2, 40, 1000000 }) { // how many values there are
                for (int kind = 0; kind < 4; ++kind) { // numbers, with NaN, with -inf, no number
                    std::vector<float> x((size_t) n*rows);
                    for (float & value : x) {
                        const bool other = random() % 2;
                        value = kind == 3 || (kind == 1 && other) ? nan : kind == 2 && other ? -inf : (float) (random() % levels) - 20.0f;
                    }
                    for (int n_threads : { 1, 3 }) {
                        const std::vector<int32_t> found = argmax(x, n, rows, n_threads);
                        for (int row = 0; row < rows; ++row) {
                            const int32_t want = expected(x.data() + (size_t) row*n, n);
                            if (found[row] != want) {
                                ++n_failed;
                                printf("FAIL n %d, row %d of %d, %d values, kind %d, %d threads: %d, expected %d\n", n, row, rows, levels, kind, n_threads, found[row], want);
                            }
                        }
                    }
                }
            }
        }
    }
    printf("%s argmax\n", n_failed ? "FAIL" : "ok  ");
    return n_failed > 0;
}
