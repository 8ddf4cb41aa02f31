// Time of ggml_gated_delta_net_tree and ggml_ssm_conv_tree against upstream's ops on the same number of tokens.
//
//   bench_gdn_tree [--threads 2] [--seconds 2] [--layers 8] [--heads 16x32] [--dk 128] [--nodes 1,2,4,8,16,32,64]
//                  [--trees chain,ddtree] [--json FILE]
//
// All variants take turns in one process, each over several layers with states of their own, so that all see the same noise
// and cold states. Figures are medians of microseconds a layer: with one thread of its processor time, which other processes
// disturb less, else of wall time.

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <vector>

struct Options {
    int    n_threads = 2, n_layers = 8, H_k = 16, H_v = 32, dk = 128;
    double seconds   = 2;
    std::vector<int>         nodes = { 1, 2, 4, 8, 16, 32, 64 };
    std::vector<std::string> trees = { "chain", "ddtree" };
    std::string              json, only;
};

static std::vector<std::string> split(const std::string & s) {
    std::vector<std::string> parts;
    size_t at = 0;
    while (at <= s.size()) {
        const size_t comma = std::min(s.find(',', at), s.size());
        parts.push_back(s.substr(at, comma - at));
        at = comma + 1;
    }
    return parts;
}

static Options parse(int argc, char ** argv) {
    Options o;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string key = argv[i], value = argv[i + 1];
        if      (key == "--threads") { o.n_threads = std::stoi(value); }
        else if (key == "--seconds") { o.seconds   = std::stod(value); }
        else if (key == "--layers")  { o.n_layers  = std::stoi(value); }
        else if (key == "--dk")      { o.dk        = std::stoi(value); }
        else if (key == "--heads")   { sscanf(value.c_str(), "%dx%d", &o.H_k, &o.H_v); }
        else if (key == "--trees")   { o.trees     = split(value); }
        else if (key == "--json")    { o.json      = value; }
        else if (key == "--only")    { o.only      = value; }  // one variant, for profiling
        else if (key == "--nodes")   { o.nodes.clear(); for (const auto & n : split(value)) { o.nodes.push_back(std::stoi(n)); } }
        else    { fprintf(stderr, "unknown option %s\n", key.c_str()); exit(1); }
    }
    return o;
}

using Rng = std::mt19937;

// best-first over independent marginals per depth, as DDTree builds its trees
static std::vector<int> make_tree(const std::string & kind, int n, Rng & rng) {
    std::vector<int> parents = { -1 };
    if (kind == "chain") {
        while ((int) parents.size() < n) { parents.push_back((int) parents.size() - 1); }
        return parents;
    }
    constexpr int n_depths = 16, n_ranks = 8;
    double log_probs[n_depths][n_ranks];
    for (auto & depth : log_probs) {
        double rest = 1, top = std::uniform_real_distribution<>(0.3, 0.95)(rng);
        for (double & lp : depth) { lp = std::log(rest*top); rest *= 1 - top; top = 0.5; }
    }
    using Entry = std::tuple<double, int, int, int>;  // log prob, minus the order of entry, parent, depth
    std::priority_queue<Entry> heap;
    int n_entries = 0;
    auto expand = [&](int node, int depth, double lp) {
        for (int r = 0; r < n_ranks && depth < n_depths; r++) { heap.push({ lp + log_probs[depth][r], -n_entries++, node, depth }); }
    };
    expand(0, 0, 0);
    while ((int) parents.size() < n) {
        const auto [lp, order, parent, depth] = heap.top();
        heap.pop();
        parents.push_back(parent);
        expand((int) parents.size() - 1, depth + 1, lp);
    }
    return parents;
}

// the path to the first node at depth 5, or to the deepest
static std::vector<int> accepted_path(const std::vector<int> & parents) {
    std::vector<int> best;
    for (int i = 0; i < (int) parents.size() && best.size() < 6; i++) {
        std::vector<int> path;
        for (int n = i; n >= 0; n = parents[n]) { path.insert(path.begin(), n); }
        if (path.size() > best.size()) { best = path; }
    }
    return best;
}

// one graph over all layers
struct Variant {
    std::string                                          name;
    std::function<void(ggml_context *, ggml_cgraph *, int)> build;  // of one layer
    ggml_context *       ctx   = nullptr;
    ggml_cgraph  *       gf    = nullptr;
    ggml_cplan           plan  = {};
    std::vector<uint8_t> work  = {};
    std::vector<double>  times = {};
};

static double now(bool cpu_time = false) {
    if (cpu_time) {
        timespec t;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return t.tv_sec + t.tv_nsec*1e-9;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char ** argv) {
    const Options opt = parse(argc, argv);
    const int dk = opt.dk, H_k = opt.H_k, H_v = opt.H_v, L = opt.n_layers, K = 4;
    const int64_t n_state = (int64_t) dk*dk*H_v, n_ch = (int64_t) dk*(2*H_k + H_v);
    const int n_most = *std::max_element(opt.nodes.begin(), opt.nodes.end());
    Rng rng(1);

    ggml_threadpool_params tpp  = ggml_threadpool_params_default(opt.n_threads);
    ggml_threadpool      * pool = ggml_threadpool_new(&tpp);

    auto buffer = [&](size_t n, float lo, float hi) {
        std::vector<float> b(n);
        uint32_t x = (uint32_t) rng();
        for (float & f : b) { x = x*1664525u + 1013904223u; f = lo + (hi - lo)*(x >> 8)*0x1.0p-24f; }
        return b;
    };

    FILE * json = opt.json.empty() ? nullptr : fopen(opt.json.c_str(), "w");
    if (json) {
        fprintf(json, "{\"dk\": %d, \"H_k\": %d, \"H_v\": %d, \"threads\": %d, \"unit\": \"us per layer, median\", \"rows\": [", dk, H_k, H_v, opt.n_threads);
    }
    bool first_row = true;

    // states and caches outlive the loop over N: they are large
    std::vector<float> state = buffer(L*n_state, -0.1f, 0.1f);
    std::vector<float> snapshots(L*n_most*n_state), out((n_most + 1)*n_state + (size_t) n_most*dk*H_v);
    std::vector<float> conv_state = buffer(L*n_ch*(K - 1), -1, 1), weights = buffer(n_ch*K, -1, 1);
    std::vector<float> conv_tape(L*n_ch*n_most), y(n_ch*(n_most + K)*4);

    for (const std::string & kind : opt.trees) {
        printf("## %s, %d threads, dk %d, %d k heads, %d v heads\n", kind.c_str(), opt.n_threads, dk, H_k, H_v);
        bool header = true;
        for (const int N : opt.nodes) {
            const std::vector<int> parents = make_tree(kind, N, rng), path = accepted_path(parents);
            const int64_t n_tape = ggml_gated_delta_net_tree_tape_size(dk, H_k, H_v, false, n_most);

            // q and k of unit length, all of one row as the convolution leaves them
            std::vector<float> qkv = buffer(N*n_ch, -1, 1), g = buffer(N*H_v, -0.2f, 0), beta = buffer(N*H_v, 0, 1);
            for (int r = 0; r < N; r++) {
                for (int h = 0; h < 2*H_k; h++) {
                    float * p = &qkv[r*n_ch + h*dk];
                    double sq = 0;
                    for (int i = 0; i < dk; i++) { sq += p[i]*p[i]; }
                    for (int i = 0; i < dk; i++) { p[i] /= (float) std::sqrt(sq); }
                }
            }
            std::vector<float>   tape(L*n_tape);
            std::vector<int32_t> rows(L*GGML_TREE_ROW(n_most), -1);

            auto at = [](ggml_tensor * t, void * data) { t->data = data; return t; };
            auto f32 = [&](ggml_context * ctx, void * data, int64_t a, int64_t b = 1, int64_t c = 1, int64_t d = 1) {
                return at(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, a, b, c, d), data);
            };
            auto part = [&](ggml_context * ctx, int H, int64_t first) {
                ggml_tensor * all = f32(ctx, qkv.data(), n_ch, N);
                return ggml_view_4d(ctx, all, dk, H, N, 1, dk*4, n_ch*4, N*n_ch*4, first*4);
            };
            auto tree = [&](ggml_context * ctx, int n_path) {
                int32_t * row = &rows[(n_path > 0)*GGML_TREE_ROW(n_most)];
                row[GGML_TREE_CELL]   = 0;
                row[GGML_TREE_N_PATH] = n_path;
                std::copy(path.begin(), path.end(), row + GGML_TREE_PATH);
                std::copy(parents.begin(), parents.end(), row + GGML_TREE_PARENTS(n_most));
                return at(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_TREE_ROW(n_most), 1), row);
            };
            auto upstream = [&](int n_snapshots, bool copy) {
                return [=, &state, &snapshots, &out, &g, &beta](ggml_context * ctx, ggml_cgraph * gf, int l) {
                    ggml_tensor * s = f32(ctx, &state[l*n_state], dk, dk, H_v, 1);
                    ggml_tensor * r = at(ggml_gated_delta_net(ctx, part(ctx, H_k, 0), part(ctx, H_k, H_k*dk), part(ctx, H_v, 2*H_k*dk),
                            f32(ctx, g.data(), 1, H_v, N), f32(ctx, beta.data(), 1, H_v, N), s, n_snapshots), out.data());
                    ggml_build_forward_expand(gf, r);
                    if (copy) {
                        ggml_tensor * from = ggml_view_2d(ctx, r, n_state, n_snapshots, n_state*4, (size_t) N*dk*H_v*4);
                        ggml_build_forward_expand(gf, ggml_cpy(ctx, from, f32(ctx, &snapshots[(size_t) l*n_most*n_state], n_state, n_snapshots)));
                    }
                };
            };
            auto by_tree = [&](ggml_gdn_tree_form form, bool fold) {
                return [=, &state, &tape, &out, &g, &beta](ggml_context * ctx, ggml_cgraph * gf, int l) {
                    ggml_tensor * r = at(ggml_gated_delta_net_tree(ctx, part(ctx, H_k, 0), part(ctx, H_k, H_k*dk), part(ctx, H_v, 2*H_k*dk),
                            f32(ctx, g.data(), 1, H_v, N), f32(ctx, beta.data(), 1, H_v, N), f32(ctx, &state[l*n_state], n_state),
                            f32(ctx, &tape[l*n_tape], n_tape), tree(ctx, fold ? (int) path.size() : 0)), out.data());
                    ggml_gated_delta_net_tree_set_form(r, form);
                    ggml_build_forward_expand(gf, r);
                };
            };
            std::vector<Variant> variants(10);
            variants[0] = { "upstream",            upstream(1, false) };
            variants[1] = { "upstream+cpy",        upstream(1, true)  };
            variants[2] = { "snapshots",           upstream(N, false) };
            variants[3] = { "snapshots+cpy",       upstream(N, true)  };
            variants[4] = { "row",                 by_tree(GGML_GDN_TREE_ROW,   false) };
            variants[5] = { "row+commit",          by_tree(GGML_GDN_TREE_ROW,   true)  };
            variants[6] = { "chunk",               by_tree(GGML_GDN_TREE_CHUNK, false) };
            variants[7] = { "chunk+commit",        by_tree(GGML_GDN_TREE_CHUNK, true)  };
            variants[8] = { "conv upstream",       [&](ggml_context * ctx, ggml_cgraph * gf, int l) {
                // as llama.cpp builds it: concatenate, convolve, copy the window back
                ggml_tensor * s  = f32(ctx, &conv_state[l*n_ch*(K - 1)], K - 1, n_ch, 1);
                ggml_tensor * xt = ggml_transpose(ctx, f32(ctx, qkv.data(), n_ch, N));
                ggml_tensor * in = at(ggml_concat(ctx, s, xt, 0), y.data());
                ggml_build_forward_expand(gf, at(ggml_ssm_conv(ctx, in, f32(ctx, weights.data(), K, n_ch)), out.data()));
                ggml_tensor * tail = ggml_view_3d(ctx, in, K - 1, n_ch, 1, in->nb[1], in->nb[2], N*4);
                ggml_build_forward_expand(gf, ggml_cpy(ctx, tail, f32(ctx, &conv_state[l*n_ch*(K - 1)], (K - 1)*n_ch)));
            } };
            variants[9] = { "conv tree",           [&](ggml_context * ctx, ggml_cgraph * gf, int l) {
                ggml_build_forward_expand(gf, at(ggml_ssm_conv_tree(ctx, f32(ctx, qkv.data(), n_ch, N), f32(ctx, &conv_state[l*n_ch*(K - 1)], n_ch*(K - 1)),
                        f32(ctx, &conv_tape[l*n_ch*n_most], n_ch*n_most), f32(ctx, weights.data(), K, n_ch), tree(ctx, (int) path.size())), out.data()));
            } };

            for (Variant & v : variants) {
                v.ctx = ggml_init({ 4u << 20, nullptr, true });
                v.gf  = ggml_new_graph(v.ctx);
                for (int l = 0; l < L; l++) {
                    v.build(v.ctx, v.gf, l);
                }
                for (ggml_tensor * t = ggml_get_first_tensor(v.ctx); t != nullptr; t = ggml_get_next_tensor(v.ctx, t)) {
                    if (t->data == nullptr && t->view_src != nullptr) { t->data = (char *) t->view_src->data + t->view_offs; }
                }
                v.plan = ggml_graph_plan(v.gf, opt.n_threads, pool);
                v.work.resize(v.plan.work_size);
                v.plan.work_data = v.work.data();
            }
            const double start = now();
            for (int round = 0; round < 5 || now() - start < opt.seconds; round++) {
                for (Variant & v : variants) {
                    if (!opt.only.empty() && round > 1 && v.name != opt.only) { continue; }
                    const double t = now(opt.n_threads == 1);
                    ggml_graph_compute(v.gf, &v.plan);
                    if (round > 0) { v.times.push_back((now(opt.n_threads == 1) - t)*1e6/L); }
                }
            }
            auto median = [](Variant & v) {
                std::sort(v.times.begin(), v.times.end());
                return v.times[v.times.size()/2];
            };
            if (header) {
                printf("%3s %4s", "N", "path");
                for (Variant & v : variants) { printf(" %13s", v.name.c_str()); }
                printf(" | %8s %8s %8s %8s\n", "row/up", "row/snap", "chk/up", "chk/snap");
                header = false;
            }
            printf("%3d %4zu", N, path.size());
            std::vector<double> m;
            for (Variant & v : variants) { m.push_back(median(v)); printf(" %13.0f", m.back()); }
            printf(" | %8.2f %8.2f %8.2f %8.2f\n", m[4]/m[0], m[5]/m[2], m[6]/m[0], m[7]/m[2]);
            fflush(stdout);
            if (json) {
                fprintf(json, "%s\n  {\"tree\": \"%s\", \"N\": %d, \"path\": %zu", first_row ? "" : ",", kind.c_str(), N, path.size());
                for (size_t i = 0; i < m.size(); i++) { fprintf(json, ", \"%s\": %.1f", variants[i].name.c_str(), m[i]); }
                fprintf(json, "}");
                first_row = false;
            }
            for (Variant & v : variants) { ggml_free(v.ctx); }
        }
    }
    if (json) {
        fprintf(json, "\n]}\n");
        fclose(json);
    }
    ggml_threadpool_free(pool);
}
