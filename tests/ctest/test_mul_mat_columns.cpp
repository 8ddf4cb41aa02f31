// A column of a product has the same bits beside others as alone: dense products and mixtures of experts, weights as they
// are and repacked. Covers vec_dot_columns.cpp, vec_dot_columns_k.cpp and the repacked kernels; needs an x86-64 with AVX2.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

static std::mt19937 rng(1);

static std::vector<float> random_floats(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> f(n);
    for (float & x : f) { x = normal(rng); }
    return f;
}

static ggml_backend_buffer_type_t repack_type() {
    auto get = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "ggml_backend_dev_get_extra_bufts");
    ggml_backend_dev_t dev = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    for (ggml_backend_buffer_type_t * type = get(dev); type && *type; ++type) {
        if (!strcmp(ggml_backend_buft_name(*type), "CPU_REPACK")) { return *type; }
    }
    return nullptr;
}

struct Case {
    ggml_type type;
    bool      repack;
    int       k, rows, experts;  // experts 0: a dense product
};

// weights times the columns of x, [n][used][rows]; empty when the CPU has no such path
static std::vector<float> product(const Case & c, const std::vector<uint8_t> & weights, const float * x, const int32_t * ids, int n, int n_threads) {
    const int used = c.experts ? 2 : 1;
    ggml_context * ctx_w = ggml_init({ ggml_tensor_overhead()*4, nullptr, true });
    ggml_context * ctx   = ggml_init({ ggml_tensor_overhead()*8 + ggml_graph_overhead(), nullptr, true });

    ggml_tensor * w = c.experts ? ggml_new_tensor_3d(ctx_w, c.type, c.k, c.rows, c.experts) : ggml_new_tensor_2d(ctx_w, c.type, c.k, c.rows);
    ggml_backend_buffer_t buf_w = ggml_backend_alloc_ctx_tensors_from_buft(ctx_w, c.repack ? repack_type() : ggml_backend_cpu_buffer_type());

    ggml_tensor * chosen = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, used, n);
    ggml_tensor * in     = c.experts ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.k, 1, n) : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.k, n);
    ggml_tensor * out    = c.experts ? ggml_mul_mat_id(ctx, w, in, chosen) : ggml_mul_mat(ctx, w, in);
    ggml_cgraph * graph  = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buf = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());

    std::vector<float> y;
    if (ggml_backend_dev_supports_op(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), out)) {
        ggml_backend_tensor_set(w, weights.data(), 0, weights.size());
        ggml_backend_tensor_set(in, x, 0, ggml_nbytes(in));
        if (c.experts) { ggml_backend_tensor_set(chosen, ids, 0, ggml_nbytes(chosen)); }
        ggml_backend_t cpu = ggml_backend_cpu_init();
        ggml_backend_cpu_set_n_threads(cpu, n_threads);
        ggml_backend_graph_compute(cpu, graph);
        y.resize(ggml_nelements(out));
        ggml_backend_tensor_get(out, y.data(), 0, ggml_nbytes(out));
        ggml_backend_free(cpu);
    }
    ggml_backend_buffer_free(buf);
    ggml_backend_buffer_free(buf_w);
    ggml_free(ctx);
    ggml_free(ctx_w);
    return y;
}

static bool check(const Case & c) {
    const int n_max = 33, used = c.experts ? 2 : 1, n_w = c.rows*std::max(1, c.experts);
    const std::vector<float> x = random_floats((size_t) n_max*c.k), wf = random_floats((size_t) n_w*c.k);
    std::vector<uint8_t> w(n_w*ggml_row_size(c.type, c.k));
    ggml_quantize_chunk(c.type, wf.data(), w.data(), 0, n_w, c.k, nullptr);
    std::vector<int32_t> ids;
    for (int i = 0; i < n_max; ++i) {  // the first expert is popular
        ids.push_back(0);
        ids.push_back(1 + (int) (rng() % (std::max(c.experts, 2) - 1)));
    }

    std::vector<float> alone;
    for (int i = 0; i < n_max; ++i) {
        const std::vector<float> y = product(c, w, x.data() + (size_t) i*c.k, ids.data() + i*used, 1, 1);
        if (y.empty()) { return true; }
        alone.insert(alone.end(), y.begin(), y.end());
    }
    bool ok = true;
    for (int n : { 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33 }) {
        const std::vector<float> y = product(c, w, x.data(), ids.data(), n, 1 + n%2);
        if (memcmp(y.data(), alone.data(), y.size()*sizeof(float)) != 0) {
            printf("%s%s k=%d rows=%d experts=%d: %d columns differ from one\n", ggml_type_name(c.type), c.repack ? " repacked" : "", c.k, c.rows, c.experts, n);
            ok = false;
        }
    }
    return ok;
}

int main() {
    if (!ggml_cpu_has_avx2() || ggml_cpu_has_llamafile() || ggml_cpu_has_amx_int8()) {
        printf("not measured on this CPU and build\n");
        return 0;
    }
    bool ok = true;
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS }) {
        for (bool repack : { false, true }) {
            if (repack && !repack_type()) { continue; }
            ok &= check({ type, repack, 256,  24, 0 });
            ok &= check({ type, repack, 1280, 41 - repack, 0 });
            ok &= check({ type, repack, 512,  40, 4 });
        }
    }
    printf(ok ? "ok\n" : "FAILED\n");
    return !ok;
}
