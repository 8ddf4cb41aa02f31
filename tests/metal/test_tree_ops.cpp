// The tree ops on the Metal backend against the CPU backend, and what Metal's results have to keep among themselves:
//
//   - outputs, states and tapes of both forms equal those of the CPU's row form within 5e-6 of the largest value
//   - a node's output has the same bits whatever other branches exist
//   - a replayed state has the same bits as one that the next call folds in, and cells of other sequences stay
//   - nodes that read what an op updated in place run after it
//
// test_tree_ops [conv] [quick] [quick-chunk] [gdn] [order] [big] [counters]      default: conv gdn order
//
// quick, quick-chunk: a part of gdn, in row and in chunk form
// counters: with the memory checker, a table of what a step of a model's layer moves

#include "../ctest/tree_cases.h"

#include "fake_metal.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-metal-common.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

static constexpr double TOLERANCE = 5e-6;

static ggml_backend_t metal, cpu;

// ---------------------------------------------------------------- graphs on a backend

using Ints = std::vector<int32_t>;

// tensors with their contents
struct Graph {
    ggml_context * ctx = ggml_init({ 4u << 20, nullptr, true });
    std::map<ggml_tensor *, Floats> floats;
    std::map<ggml_tensor *, Ints>   ints;
    std::vector<ggml_tensor *>      nodes;

    ~Graph() { ggml_free(ctx); }

    ggml_tensor * tensor(const Floats & data, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1, int64_t ne3 = 1) {
        ggml_tensor * t = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, ne0, ne1, ne2, ne3);
        GGML_ASSERT((int64_t) data.size() == ggml_nelements(t));
        floats[t] = data;
        return t;
    }

    ggml_tensor * rows(const std::vector<Tree> & trees, int n_max) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_TREE_ROW(n_max), trees.size());
        Ints & all = ints[t];
        for (const Tree & tree : trees) {
            Ints row(t->ne[0], -1);
            row[GGML_TREE_CELL]   = tree.cell;
            row[GGML_TREE_N_PATH] = (int32_t) tree.path.size();
            std::copy(tree.path.begin(),    tree.path.end(),    row.begin() + GGML_TREE_PATH);
            std::copy(tree.parents.begin(), tree.parents.end(), row.begin() + GGML_TREE_PARENTS(n_max));
            all.insert(all.end(), row.begin(), row.end());
        }
        return t;
    }

    ggml_tensor * node(ggml_tensor * t) {
        nodes.push_back(t);
        return t;
    }

    // runs the nodes; returns the contents of `wanted` afterwards
    std::vector<Floats> run(ggml_backend_t backend, const std::vector<ggml_tensor *> & wanted) {
        ggml_cgraph * gf = ggml_new_graph(ctx);
        for (ggml_tensor * t : nodes) {
            ggml_build_forward_expand(gf, t);
        }
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        for (auto & t : floats) {
            ggml_backend_tensor_set(t.first, t.second.data(), 0, ggml_nbytes(t.first));
        }
        for (auto & t : ints) {
            ggml_backend_tensor_set(t.first, t.second.data(), 0, ggml_nbytes(t.first));
        }
        if (backend == metal) {
            ggml_graph_optimize(gf);
        }
        check(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS, "the graph runs");
        std::vector<Floats> results;
        for (ggml_tensor * t : wanted) {
            results.emplace_back(ggml_nelements(t));
            ggml_backend_tensor_get(t, results.back().data(), 0, ggml_nbytes(t));
        }
        ggml_backend_buffer_free(buffer);
        return results;
    }
};

static void check_close(const Floats & got, const Floats & expected, const char * quantity, const std::string & id) {
    double largest = 1e-3, error = 0;
    size_t where = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        largest = std::max(largest, (double) std::fabs(expected[i]));
        const double e = std::fabs((double) got[i] - expected[i]);
        if (!(e <= error)) {  // a NaN is an error too
            error = e;
            where = i;
        }
    }
    char text[160];
    snprintf(text, sizeof(text), ": %s differs at %zu of %zu: %.9g, expected %.9g", quantity, where, expected.size(), got[where], expected[where]);
    check(error <= TOLERANCE*largest, id + text);
}

static Floats random_floats(Rng & rng, size_t n, float lo, float hi) {
    Floats f(n);
    for (float & x : f) {
        x = random_float(rng, lo, hi);
    }
    return f;
}

// rows of length 1
static Floats random_units(Rng & rng, size_t n_rows, int n) {
    Floats f = random_floats(rng, n_rows*n, -1, 1);
    for (size_t r = 0; r < n_rows; r++) {
        double sum = 1e-6;
        for (int i = 0; i < n; i++) {
            sum += f[r*n + i]*f[r*n + i];
        }
        for (int i = 0; i < n; i++) {
            f[r*n + i] /= (float) std::sqrt(sum);
        }
    }
    return f;
}

// columns `ids` of x [row, n, s]
static Floats pick(const Floats & x, size_t row, int n, int s, const std::vector<int> & ids) {
    Floats f;
    for (int i : ids) {
        auto first = x.begin() + ((size_t) s*n + i)*row;
        f.insert(f.end(), first, first + row);
    }
    return f;
}

static Floats slice(const Floats & x, size_t first, size_t n) { return Floats(x.begin() + first, x.begin() + first + n); }

static void check_other_cells(const Floats & after, const Floats & before, size_t row, const std::vector<Tree> & trees, const char * quantity, const std::string & id) {
    std::set<int> used;
    for (const Tree & t : trees) {
        used.insert(t.cell);
    }
    for (size_t cell = 0; cell*row < before.size(); cell++) {
        if (!used.count((int) cell)) {
            check_bits(&after[cell*row], &before[cell*row], row, quantity, id + ", a cell that is not used");
        }
    }
}

// ---------------------------------------------------------------- the convolution

struct ConvShape {
    int K, channels, n_max, n_cells;
};

struct ConvCache {
    Floats state, tape;
};

static Floats conv_tree(ggml_backend_t backend, const ConvShape & sh, ConvCache & cache, const Floats & w, const std::vector<Tree> & trees, const Floats & x) {
    Graph g;
    const int n_seqs = (int) trees.size(), N = (int) trees[0].parents.size();
    ggml_tensor * state = g.tensor(cache.state, (sh.K - 1)*sh.channels, sh.n_cells);
    ggml_tensor * tape  = g.tensor(cache.tape, sh.channels*sh.n_max, sh.n_cells);
    ggml_tensor * out   = g.node(ggml_ssm_conv_tree(g.ctx, g.tensor(x, sh.channels, N, n_seqs), state, tape,
        g.tensor(w, sh.K, sh.channels), g.rows(trees, sh.n_max)));
    auto r = g.run(backend, { out, state, tape });
    cache = { r[1], r[2] };
    return r[0];
}

static void conv_replay(ggml_backend_t backend, const ConvShape & sh, ConvCache & cache, const std::vector<Tree> & trees) {
    Graph g;
    ggml_tensor * state = g.tensor(cache.state, (sh.K - 1)*sh.channels, sh.n_cells);
    ggml_tensor * tape  = g.tensor(cache.tape, sh.channels*sh.n_max, sh.n_cells);
    g.node(ggml_ssm_conv_replay(g.ctx, state, tape, g.rows(trees, sh.n_max), sh.K));
    auto r = g.run(backend, { state, tape });
    cache = { r[0], r[1] };
}

static void test_conv(const std::string & kind, int N, int n_seqs, const ConvShape & sh, Rng & rng) {
    const std::string id = "conv-" + kind + "-n" + std::to_string(N) + "-k" + std::to_string(sh.K) + "-c" + std::to_string(sh.channels) + "-seqs" + std::to_string(n_seqs);
    const size_t state_row = (sh.K - 1)*sh.channels, tape_row = sh.channels*sh.n_max;
    const auto cells = random_cells(n_seqs, sh.n_cells, rng);
    const Floats w = random_floats(rng, sh.K*sh.channels, -1, 1);
    ConvCache on_metal { random_floats(rng, state_row*sh.n_cells, -1, 1), random_floats(rng, tape_row*sh.n_cells, -1, 1) }, on_cpu = on_metal;

    std::vector<Tree> trees(n_seqs);
    for (int step = 0; step < 2; step++) {
        for (int s = 0; s < n_seqs; s++) {
            std::vector<int> path;
            if (step > 0 && s != 1) {  // one sequence has nothing to fold in
                path = path_to(trees[s].parents, random_int(rng, 0, N - 1));
            }
            trees[s] = { cells[s], path, make_tree(kind, N, rng) };
        }
        const Floats x = random_floats(rng, (size_t) sh.channels*N*n_seqs, -1, 1);
        const ConvCache before = on_metal;
        const Floats got      = conv_tree(metal, sh, on_metal, w, trees, x);
        const Floats expected = conv_tree(cpu,   sh, on_cpu,   w, trees, x);
        check_close(got, expected, "output", id);
        check_close(on_metal.state, on_cpu.state, "conv_state", id);
        check_close(on_metal.tape,  on_cpu.tape,  "tape", id);
        check_other_cells(on_metal.state, before.state, state_row, trees, "conv_state", id);
        check_other_cells(on_metal.tape,  before.tape,  tape_row,  trees, "tape", id);

        // the path to a node alone, and the window by a replay
        const int s = random_int(rng, 0, n_seqs - 1), node = random_int(rng, 0, N - 1);
        const auto path = path_to(trees[s].parents, node);
        ConvCache again = before;
        const Floats chain = conv_tree(metal, sh, again, w, { { cells[s], trees[s].path, chain_of(path.size()) } }, pick(x, sh.channels, N, s, path));
        check_bits(chain.data() + (path.size() - 1)*sh.channels, &got[((size_t) s*N + node)*sh.channels], sh.channels, "output with and without other branches", id);

        ConvCache replayed = before;
        conv_replay(metal, sh, replayed, { { cells[s], trees[s].path, {} } });
        check_bits(&replayed.state[cells[s]*state_row], &on_metal.state[cells[s]*state_row], state_row, "replayed conv_state", id);
        check_bits(replayed.tape.data(), before.tape.data(), before.tape.size(), "tape after a replay", id);
    }
}

// ---------------------------------------------------------------- the gated delta rule

struct GdnShape {
    int  dk, H_k, H_v, n_max, n_cells;
    bool kda;
    ggml_gdn_tree_form form = GGML_GDN_TREE_ROW;
    int  ng()    const { return kda ? dk : 1; }
    int  state() const { return dk*dk*H_v; }
    int  tape()  const { return (int) ggml_gated_delta_net_tree_tape_size(dk, H_k, H_v, kda, n_max); }
    std::string id() const { return "dk" + std::to_string(dk) + "-h" + std::to_string(H_k) + "x" + std::to_string(H_v) + (kda ? "-kda" : "") + (form == GGML_GDN_TREE_CHUNK ? "-chunk" : ""); }
};

struct GdnCache {
    Floats state, tape;
};

struct GdnInput {  // of n_seqs trees of N nodes
    Floats qkv, g, beta;
};

static GdnInput random_input(const GdnShape & sh, int n_columns, Rng & rng) {
    GdnInput in;
    for (int i = 0; i < n_columns; i++) {  // q, k and v are views of one tensor, as a model's convolution leaves them
        for (const Floats & part : { random_units(rng, 2*sh.H_k, sh.dk), random_floats(rng, sh.H_v*sh.dk, -1, 1) }) {
            in.qkv.insert(in.qkv.end(), part.begin(), part.end());
        }
    }
    in.g = random_floats(rng, (size_t) n_columns*sh.H_v*sh.ng(), -0.2f, 0);
    for (float & g : in.g) {
        const int kind = random_int(rng, 0, 7);
        g = kind == 0 ? 0.0f : kind == 1 ? random_float(rng, -20, -5) : g;
    }
    in.beta = random_floats(rng, (size_t) n_columns*sh.H_v, 0, 1);
    return in;
}

static ggml_tensor * gdn_node(Graph & g, const GdnShape & sh, ggml_tensor * state, ggml_tensor * tape, ggml_tensor * rows, const GdnInput & in, int N, int n_seqs) {
    const int64_t nk = sh.H_k*sh.dk, row = 2*nk + sh.H_v*sh.dk;
    ggml_tensor * qkv = g.tensor(in.qkv, row, N, n_seqs);
    auto view = [&](int H, int64_t first) {
        return ggml_view_4d(g.ctx, qkv, sh.dk, H, N, n_seqs, sh.dk*sizeof(float), row*sizeof(float), N*row*sizeof(float), first*sizeof(float));
    };
    ggml_tensor * out = ggml_gated_delta_net_tree(g.ctx, view(sh.H_k, 0), view(sh.H_k, nk), view(sh.H_v, 2*nk),
        g.tensor(in.g, sh.ng(), sh.H_v, N, n_seqs), g.tensor(in.beta, 1, sh.H_v, N, n_seqs), state, tape, rows);
    ggml_gated_delta_net_tree_set_form(out, sh.form);
    return g.node(out);
}

static Floats gdn_tree(ggml_backend_t backend, const GdnShape & sh, GdnCache & cache, const std::vector<Tree> & trees, const GdnInput & in) {
    Graph g;
    ggml_tensor * state = g.tensor(cache.state, sh.state(), sh.n_cells);
    ggml_tensor * tape  = g.tensor(cache.tape,  sh.tape(),  sh.n_cells);
    ggml_tensor * out   = gdn_node(g, sh, state, tape, g.rows(trees, sh.n_max), in, (int) trees[0].parents.size(), (int) trees.size());
    auto r = g.run(backend, { out, state, tape });
    cache = { r[1], r[2] };
    return r[0];
}

static void gdn_replay(ggml_backend_t backend, const GdnShape & sh, GdnCache & cache, const std::vector<Tree> & trees) {
    Graph g;
    ggml_tensor * state = g.tensor(cache.state, sh.state(), sh.n_cells);
    ggml_tensor * tape  = g.tensor(cache.tape,  sh.tape(),  sh.n_cells);
    g.node(ggml_gated_delta_net_replay(g.ctx, state, tape, g.rows(trees, sh.n_max), sh.dk, sh.H_k, sh.H_v, sh.kda));
    auto r = g.run(backend, { state, tape });
    cache = { r[0], r[1] };
}

static void test_gdn(const std::string & kind, int N, int n_seqs, const GdnShape & sh, Rng & rng) {
    const std::string id = "gdn-" + sh.id() + "-" + kind + "-n" + std::to_string(N) + "-seqs" + std::to_string(n_seqs);
    const int o_row = sh.H_v*sh.dk;
    GdnShape row_form = sh;
    row_form.form = GGML_GDN_TREE_ROW;
    const auto cells = random_cells(n_seqs, sh.n_cells, rng);
    GdnCache on_metal { random_floats(rng, (size_t) sh.state()*sh.n_cells, -0.3f, 0.3f), random_floats(rng, (size_t) sh.tape()*sh.n_cells, -0.3f, 0.3f) }, on_cpu = on_metal;

    std::vector<Tree> trees(n_seqs);
    for (int step = 0; step < 2; step++) {
        for (int s = 0; s < n_seqs; s++) {
            std::vector<int> path;
            if (step > 0 && s != 1) {
                path = path_to(trees[s].parents, s == 0 ? N - 1 : random_int(rng, 0, N - 1));
            }
            trees[s] = { cells[s], path, make_tree(kind, N, rng) };
        }
        const GdnInput in = random_input(sh, N*n_seqs, rng);
        const GdnCache before = on_metal;
        const Floats got      = gdn_tree(metal, sh, on_metal, trees, in);
        const Floats expected = gdn_tree(cpu,   row_form, on_cpu, trees, in);
        check_close(got, expected, "output", id);
        check_close(on_metal.state, on_cpu.state, "gdn_state", id);
        check_close(on_metal.tape,  on_cpu.tape,  "tape", id);
        check_other_cells(on_metal.state, before.state, sh.state(), trees, "gdn_state", id);
        check_other_cells(on_metal.tape,  before.tape,  sh.tape(),  trees, "tape", id);

        // the path to a node alone, and the state by a replay
        const int s = random_int(rng, 0, n_seqs - 1), node = N - 1 - random_int(rng, 0, N/3);
        const auto path = path_to(trees[s].parents, node);
        const GdnInput on_path {
            pick(in.qkv, (2*sh.H_k + sh.H_v)*sh.dk, N, s, path), pick(in.g, sh.H_v*sh.ng(), N, s, path), pick(in.beta, sh.H_v, N, s, path),
        };
        GdnCache again = before;
        const Floats chain = gdn_tree(metal, sh, again, { { cells[s], trees[s].path, chain_of(path.size()) } }, on_path);
        for (size_t i = 0; i < path.size(); i++) {
            check_bits(&chain[i*o_row], &got[((size_t) s*N + path[i])*o_row], o_row, "output with and without other branches", id);
        }

        GdnCache replayed = before;
        gdn_replay(metal, sh, replayed, { { cells[s], trees[s].path, {} } });
        check_bits(&replayed.state[(size_t) cells[s]*sh.state()], &on_metal.state[(size_t) cells[s]*sh.state()], sh.state(), "replayed gdn_state", id);
        check_bits(replayed.tape.data(), before.tape.data(), before.tape.size(), "tape after a replay", id);
    }
}

// a GPU without simdgroup matrices: the row form stands in
static void test_gdn_without_matrices(Rng & rng) {
    fake_metal::props().has_simdgroup_mm = false;
    fake_metal::log.clear();
    fake_metal::keep_log = true;
    test_gdn("random", 9, 2, { 32, 1, 2, 16, 2, false, GGML_GDN_TREE_CHUNK }, rng);
    fake_metal::keep_log = false;
    fake_metal::props().has_simdgroup_mm = true;
    for (auto & d : fake_metal::log) {
        check(d.kernel.find("_chunk_") == std::string::npos, "no simdgroup matrices, but " + d.kernel);
    }
}

// ---------------------------------------------------------------- order of nodes in a graph

// A step, reads of what it left, a flush, and reads again: the reads are no sources of the ops, only the caches tell.
static void test_order(ggml_gdn_tree_form form, Rng & rng) {
    const GdnShape  sh   { 32, 1, 2, 4, 2, false, form };
    const ConvShape conv { 4, 64, 4, 2 };
    const std::vector<Tree> trees = { { 1, { 0, 1 }, { -1, 0, 0, 1 } } }, flush = { { 1, { 0, 2 }, {} } };
    const GdnInput in = random_input(sh, 4, rng);
    const Floats state0 = random_floats(rng, sh.state()*sh.n_cells, -0.3f, 0.3f), tape0 = random_floats(rng, sh.tape()*sh.n_cells, -0.3f, 0.3f);
    const Floats conv_state0 = random_floats(rng, (conv.K - 1)*conv.channels*conv.n_cells, -1, 1), conv_tape0 = random_floats(rng, conv.channels*conv.n_max*conv.n_cells, -1, 1);
    const Floats x = random_floats(rng, conv.channels*4, -1, 1), w = random_floats(rng, conv.K*conv.channels, -1, 1);

    auto run = [&](ggml_backend_t backend) {
        Graph g;
        ggml_tensor * state = g.tensor(state0, sh.state(), sh.n_cells), * tape = g.tensor(tape0, sh.tape(), sh.n_cells);
        ggml_tensor * conv_state = g.tensor(conv_state0, (conv.K - 1)*conv.channels, conv.n_cells), * conv_tape = g.tensor(conv_tape0, conv.channels*conv.n_max, conv.n_cells);
        ggml_tensor * rows = g.rows(trees, sh.n_max), * flush_rows = g.rows(flush, sh.n_max);
        std::vector<ggml_tensor *> wanted;
        auto read = [&] {
            for (ggml_tensor * t : { state, tape, conv_state, conv_tape }) {
                wanted.push_back(g.node(ggml_scale(g.ctx, t, 2.0f)));
            }
        };
        read();
        wanted.push_back(g.node(ggml_ssm_conv_tree(g.ctx, g.tensor(x, conv.channels, 4, 1), conv_state, conv_tape, g.tensor(w, conv.K, conv.channels), rows)));
        wanted.push_back(gdn_node(g, sh, state, tape, rows, in, 4, 1));
        read();
        g.node(ggml_ssm_conv_replay(g.ctx, conv_state, conv_tape, flush_rows, conv.K));
        g.node(ggml_gated_delta_net_replay(g.ctx, state, tape, flush_rows, sh.dk, sh.H_k, sh.H_v, sh.kda));
        read();
        wanted.push_back(gdn_node(g, sh, state, tape, rows, in, 4, 1));
        read();
        return g.run(backend, wanted);
    };
    const auto got = run(metal), expected = run(cpu);
    for (size_t i = 0; i < expected.size(); i++) {
        check_close(got[i], expected[i], "value", (form == GGML_GDN_TREE_CHUNK ? "order-chunk-node" : "order-node") + std::to_string(i));
    }
}

// ---------------------------------------------------------------- memory traffic

// The whole delta rule of a layer: a path of as many nodes as the tree is deep is folded in, then N nodes are verified.
// What a key head and its value heads move is counted, and multiplied by the key heads.
static void print_counters(const char * model, const GdnShape & layer) {
    GdnShape shape = layer;
    shape.H_k = 1;
    shape.H_v = layer.H_v/layer.H_k;
    const bool chunk = shape.form == GGML_GDN_TREE_CHUNK;
    const std::string main = chunk ? "kernel_gated_delta_net_tree_chunk_f32_4" : "kernel_gated_delta_net_tree_f32_4";
    const int state_buffer = chunk ? 5 : 6;
    const double MiB = 1024.0*1024.0/layer.H_k, state_bytes = shape.state()*4.0;
    for (int N : { 1, 8, 16, 32, 64 }) {
        Rng rng(N);
        GdnShape sh = shape;
        sh.n_max = N;
        GdnCache cache { random_floats(rng, sh.state(), -0.3f, 0.3f), random_floats(rng, sh.tape(), 0, 0.3f) };
        const Parents parents = make_tree("deep", N, rng);
        const auto path = path_to(parents, N - 1);
        fake_metal::log.clear();
        fake_metal::keep_log = true;
        gdn_tree(metal, sh, cache, { { 0, path, parents } }, random_input(sh, N, rng));
        fake_metal::keep_log = false;

        double state = 0, unique = 0, asked = 0;
        msl::counters n;
        for (auto & d : fake_metal::log) {
            for (auto & t : d.traffic) {
                unique += t.unique_read + t.unique_written;
                asked  += t.read + t.written;
                if (t.buffer == state_buffer && d.kernel == main) {
                    state += t.read + t.written;
                }
            }
            if (d.kernel == main) {
                n = d.counters;
            }
        }
        // at least: the state once in and out; q, k, v, g, beta, outputs and tape of N nodes; the tape of the path
        const double node = 4.0*(2*sh.H_k*sh.dk + 2*sh.H_v*sh.dk + 2*sh.H_v), tape = sh.tape()*4.0/N;
        const double least = 2*state_bytes + N*(node + tape) + path.size()*tape;
        printf("| %s | %s | %d | %.2f | %.3f | %.2f | %.2f | %.3f | %.1f | %.0f | %.0f | %.0f |\n", model, chunk ? "chunk" : "row", N, state/MiB, state/(2*state_bytes),
            least/MiB, unique/MiB, unique/least, asked/MiB, (double) n.threadgroup_barriers/n.threadgroups,
            (double) n.simdgroup_barriers/n.threadgroups, (double) n.simdgroup_operations/n.threadgroups);
        check(fake_metal::log.size() == (chunk ? 3 : 2) && state >= 2*state_bytes && state <= 1.1*2*state_bytes,
            std::string(model) + ": the state is read once and written once (with the memory checker)");
    }
}

// ---------------------------------------------------------------- main

int main(int argc, char ** argv) {
    std::set<std::string> parts(argv + 1, argv + argc);
    if (parts.empty()) {
        parts = { "conv", "gdn", "order" };
    }
    metal = ggml_backend_dev_init(ggml_backend_dev_by_name("MTL0"), nullptr);
    cpu   = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    Rng rng(20240611);

    if (parts.count("conv")) {
        for (const char * kind : tree_kinds) {
            test_conv(kind, random_int(rng, 5, 9), 2, { 4, 72, 12, 4 }, rng);
        }
        test_conv("random", 1, 1, { 4, 64, 1, 1 }, rng);
        test_conv("random", 64, 1, { 4, 65, 64, 1 }, rng);
        test_conv("deep", 7, 3, { 2, 40, 8, 3 }, rng);
        test_conv("random", 7, 1, { 3, 40, 8, 3 }, rng);
        test_conv("chain", 12, 1, { 9, 33, 16, 2 }, rng);
    }
    for (ggml_gdn_tree_form form : { GGML_GDN_TREE_ROW, GGML_GDN_TREE_CHUNK }) {
        if (parts.count(form == GGML_GDN_TREE_ROW ? "quick" : "quick-chunk") || parts.count("gdn")) {
            for (bool kda : { false, true }) {
                for (const char * kind : tree_kinds) {
                    test_gdn(kind, random_int(rng, 6, 12), 3, { 32, 2, 4, 16, 4, kda, form }, rng);
                }
                test_gdn("binary", 63, 1, { 32, 1, 1, 64, 1, kda, form }, rng);  // the most kept states
                test_gdn("random", 64, 1, { 32, 1, 1, 64, 1, kda, form }, rng);
                test_gdn("random", 11, 2, { 64, 1, 3, 16, 3, kda, form }, rng);
            }
        }
        if (parts.count("gdn")) {
            for (bool kda : { false, true }) {
                test_gdn("chain",  64, 1, { 32, 1, 1, 64, 1, kda, form }, rng);
                test_gdn("star",   33, 1, { 32, 1, 1, 64, 1, kda, form }, rng);
                test_gdn("random",  1, 2, { 64, 1, 1,  4, 2, kda, form }, rng);
                test_gdn("binary", 15, 1, { 128, 1, 2, 16, 2, kda, form }, rng);
            }
        }
        if (parts.count("gdn") && form == GGML_GDN_TREE_CHUNK) {
            test_gdn_without_matrices(rng);
        }
        if (parts.count("big")) {
            for (int dk : { 32, 64, 128 }) {
                for (int N : { 2, 17, 32, 48, 64 }) {
                    for (const char * kind : tree_kinds) {
                        test_gdn(kind, N, 1, { dk, 1, 2, 64, 2, N % 2 == 0, form }, rng);
                    }
                }
            }
        }
        if (parts.count("order")) {
            test_order(form, rng);
        }
    }
    if (parts.count("counters")) {
        printf("| model | form | nodes | state, MiB | of a read and a write | least in all, MiB | touched, MiB | of the least | loads and stores, MiB "
               "| threadgroup barriers | simdgroup barriers | simd operations |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
        for (ggml_gdn_tree_form form : { GGML_GDN_TREE_ROW, GGML_GDN_TREE_CHUNK }) {
            print_counters("35B-A3B", { 128, 16, 32, 0, 1, false, form });
            print_counters("27B",     { 128, 16, 48, 0, 1, false, form });
        }
    }
    check(fake_metal::violations() == 0, "no violations");
    ggml_backend_free(metal);
    ggml_backend_free(cpu);
    return finish("metal_tree_ops");
}
