// Draft trees and a minimal harness for the tests of the tree ops.

#pragma once

#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

// ---------------------------------------------------------------- checks

static int n_checks = 0, n_failures = 0;

static inline bool check(bool ok, const std::string & what) {
    n_checks++;
    if (!ok) {
        n_failures++;
        printf("FAIL %s\n", what.c_str());
    }
    return ok;
}

// `quantity` of `id` has the same bits
static inline bool check_bits(const float * a, const float * b, size_t n, const char * quantity, const std::string & id) {
    if (memcmp(a, b, n*sizeof(float)) == 0) {
        return check(true, "");
    }
    size_t i = 0;
    while (memcmp(a + i, b + i, sizeof(float)) == 0) {
        i++;
    }
    char buf[160];
    snprintf(buf, sizeof(buf), ": %s differs at %zu of %zu: %.9g, expected %.9g", quantity, i, n, a[i], b[i]);
    return check(false, id + buf);
}

static inline int finish(const char * name) {
    printf("%s: %d checks, %d failures\n", name, n_checks, n_failures);
    return n_failures == 0 ? 0 : 1;
}

// ---------------------------------------------------------------- trees

using Rng     = std::mt19937_64;
using Parents = std::vector<int>;

static inline int random_int(Rng & rng, int lo, int hi) {  // inclusive
    return std::uniform_int_distribution<int>(lo, hi)(rng);
}

static inline float random_float(Rng & rng, float lo, float hi) {
    return lo + (hi - lo)*(float) ((rng() >> 40)*0x1.0p-24);
}

static inline Parents make_tree(const std::string & kind, int n, Rng & rng) {
    Parents p(n, -1);
    for (int i = 1; i < n; i++) {
        p[i] = kind == "chain"  ? i - 1
             : kind == "star"   ? 0
             : kind == "deep"   ? std::max(0, i - 1 - random_int(rng, 0, 2))
             : kind == "binary" ? (i - 1)/2
             :                    random_int(rng, 0, i - 1);
    }
    return p;
}

static const char * const tree_kinds[] = { "chain", "star", "deep", "binary", "random" };

// root first, `node` last
static inline std::vector<int> path_to(const Parents & parents, int node) {
    std::vector<int> path;
    for (; node >= 0; node = parents[node]) {
        path.insert(path.begin(), node);
    }
    return path;
}

static inline Parents chain_of(size_t n) {
    Parents p;
    for (size_t i = 0; i < n; i++) {
        p.push_back((int) i - 1);
    }
    return p;
}

// what one sequence passes to a tree op
struct Tree {
    int              cell;
    std::vector<int> path;     // accepted nodes of the previous tree
    Parents          parents;
};

static inline ggml_tensor * tree_rows(ggml_context * ctx, const std::vector<Tree> & trees, int n_max) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_TREE_ROW(n_max), trees.size());
    for (size_t s = 0; s < trees.size(); s++) {
        int32_t * row = (int32_t *) ((char *) t->data + s*t->nb[1]);
        std::fill(row, row + t->ne[0], -1);
        row[GGML_TREE_CELL]   = trees[s].cell;
        row[GGML_TREE_N_PATH] = (int32_t) trees[s].path.size();
        std::copy(trees[s].path.begin(), trees[s].path.end(), row + GGML_TREE_PATH);
        std::copy(trees[s].parents.begin(), trees[s].parents.end(), row + GGML_TREE_PARENTS(n_max));
    }
    return t;
}

// n sequences in distinct cells, in no particular order
static inline std::vector<int> random_cells(int n, int n_cells, Rng & rng) {
    std::vector<int> cells;
    for (int i = 0; i < n_cells; i++) {
        cells.insert(cells.begin() + random_int(rng, 0, i), i);
    }
    cells.resize(n);
    return cells;
}

// ---------------------------------------------------------------- graphs

using Floats = std::vector<float>;

static inline ggml_tensor * tensor_2d(ggml_context * ctx, const Floats & data, int64_t ne0, int64_t ne1) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1);
    GGML_ASSERT((int64_t) data.size() == ne0*ne1);
    memcpy(t->data, data.data(), ggml_nbytes(t));
    return t;
}

static inline Floats floats_of(const ggml_tensor * t) {
    Floats f(ggml_nelements(t));
    memcpy(f.data(), t->data, ggml_nbytes(t));
    return f;
}

// `build` makes the graph and returns its output, `read` looks at the results
static inline void compute(size_t n_floats, int n_threads, const std::function<ggml_tensor *(ggml_context *)> & build,
                           const std::function<void(ggml_tensor *)> & read) {
    static std::vector<uint8_t> mem;  // kept: to map and clear it for each case takes longer than the case
    mem.resize(std::max(mem.size(), n_floats*sizeof(float) + (8u << 20)));
    ggml_context * ctx = ggml_init({ mem.size(), mem.data(), false });
    ggml_tensor  * out = build(ctx);
    ggml_cgraph  * gf  = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, out);
    ggml_graph_compute_with_ctx(ctx, gf, n_threads);
    read(out);
    ggml_free(ctx);
}
