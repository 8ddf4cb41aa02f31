// ggml_gated_delta_net_tree and ggml_gated_delta_net_replay against a float64 statement of the recurrence and, bit for
// bit, against ggml_gated_delta_net called token by token.

#include "tree_cases.h"

#include <algorithm>
#include <cmath>

struct Shape {
    int  dk, H_k, H_v, n_max, n_cells;
    bool kda;
    int  ng()     const { return kda ? dk : 1; }
    int  state()  const { return dk*dk*H_v; }
    int  tape()   const { return (int) ggml_gated_delta_net_tree_tape_size(dk, H_k, H_v, kda, n_max); }
    std::string id() const {
        return "dk" + std::to_string(dk) + "-h" + std::to_string(H_k) + "x" + std::to_string(H_v) + (kda ? "-kda" : "");
    }
};

// inputs of one node of one sequence
struct Node {
    Floats q, k, v, g, beta;  // [H_k*dk], [H_k*dk], [H_v*dk], [H_v*ng], [H_v]
};

using Nodes = std::vector<Node>;

enum Decay { MILD, STRONG, NONE, MIXED };

static Node random_node(const Shape & sh, Decay decay, Rng & rng) {
    Node x;
    auto unit = [&](Floats & f) {
        for (int h = 0; h < sh.H_k; h++) {
            double sq = 1e-6;
            Floats r(sh.dk);
            for (float & y : r) { y = random_float(rng, -1, 1); sq += y*y; }
            for (float & y : r) { f.push_back((float) (y/std::sqrt(sq))); }
        }
    };
    unit(x.q);
    unit(x.k);
    for (int i = 0; i < sh.H_v*sh.dk;   i++) { x.v.push_back(random_float(rng, -1, 1)); }
    for (int i = 0; i < sh.H_v*sh.ng(); i++) {
        const Decay d = decay == MIXED ? (Decay) random_int(rng, MILD, NONE) : decay;
        x.g.push_back(d == NONE ? 0.0f : d == MILD ? random_float(rng, -0.2f, 0) : random_float(rng, -20, -5));
    }
    for (int i = 0; i < sh.H_v; i++) { x.beta.push_back(random_float(rng, 0, 1)); }
    return x;
}

static Nodes random_nodes(const Shape & sh, int n, Decay decay, Rng & rng) {
    Nodes nodes;
    for (int i = 0; i < n; i++) {
        nodes.push_back(random_node(sh, decay, rng));
    }
    return nodes;
}

static Nodes pick(const Nodes & nodes, const std::vector<int> & ids) {
    Nodes res;
    for (int i : ids) {
        res.push_back(nodes[i]);
    }
    return res;
}

static Floats random_floats(size_t n, Rng & rng) {
    Floats f(n);
    for (float & y : f) { y = random_float(rng, -0.3f, 0.3f); }
    return f;
}

// ---------------------------------------------------------------- the ops

struct Inputs {
    ggml_tensor * q, * k, * v, * g, * beta;
};

// nodes: [n_seqs][N]. q, k and v are strided views of one tensor, as a model's convolution leaves them
static Inputs inputs(ggml_context * ctx, const Shape & sh, const std::vector<Nodes> & nodes) {
    const int     S = (int) nodes.size(), N = (int) nodes[0].size();
    const int64_t nk = sh.H_k*sh.dk, nv = sh.H_v*sh.dk, row = 2*nk + nv;
    ggml_tensor * qkv = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, row, N, S);
    Inputs in;
    in.g    = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, sh.ng(), sh.H_v, N, S);
    in.beta = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1, sh.H_v, N, S);
    for (int s = 0; s < S; s++) {
        for (int n = 0; n < N; n++) {
            const Node & x = nodes[s][n];
            float * p = (float *) qkv->data + (s*N + n)*row;
            std::copy(x.q.begin(), x.q.end(), p);
            std::copy(x.k.begin(), x.k.end(), p + nk);
            std::copy(x.v.begin(), x.v.end(), p + 2*nk);
            std::copy(x.g.begin(), x.g.end(), (float *) in.g->data + (s*N + n)*sh.H_v*sh.ng());
            std::copy(x.beta.begin(), x.beta.end(), (float *) in.beta->data + (s*N + n)*sh.H_v);
        }
    }
    auto view = [&](int H, int64_t first) {
        return ggml_view_4d(ctx, qkv, sh.dk, H, N, S, sh.dk*sizeof(float), row*sizeof(float), N*row*sizeof(float), first*sizeof(float));
    };
    in.q = view(sh.H_k, 0);
    in.k = view(sh.H_k, nk);
    in.v = view(sh.H_v, 2*nk);
    return in;
}

struct Cache {
    Floats state, tape;  // [n_cells][...]
    Cache(const Shape & sh, Rng & rng) : state(random_floats((size_t) sh.n_cells*sh.state(), rng)), tape(random_floats((size_t) sh.n_cells*sh.tape(), rng)) {}
};

// outputs [n_seqs][N][H_v*dk]; updates the cache
static Floats run_tree(const Shape & sh, Cache & cache, const std::vector<Tree> & trees, const std::vector<Nodes> & nodes, ggml_gdn_tree_form form, int n_threads) {
    ggml_tensor * state = nullptr, * tape = nullptr;
    Floats o;
    const size_t n_floats = cache.state.size() + cache.tape.size() + nodes.size()*nodes[0].size()*sh.dk*(2*sh.H_k + 4*sh.H_v);
    compute(n_floats + (4u << 20), n_threads, [&](ggml_context * ctx) {
        Inputs in = inputs(ctx, sh, nodes);
        state = tensor_2d(ctx, cache.state, sh.state(), sh.n_cells);
        tape  = tensor_2d(ctx, cache.tape,  sh.tape(),  sh.n_cells);
        ggml_tensor * out = ggml_gated_delta_net_tree(ctx, in.q, in.k, in.v, in.g, in.beta, state, tape, tree_rows(ctx, trees, sh.n_max));
        ggml_gated_delta_net_tree_set_form(out, form);
        return out;
    }, [&](ggml_tensor * out) {
        o           = floats_of(out);
        cache.state = floats_of(state);
        cache.tape  = floats_of(tape);
    });
    return o;
}

static void run_replay(const Shape & sh, Cache & cache, const std::vector<Tree> & trees, int n_threads) {
    ggml_tensor * tape = nullptr;
    Floats before = cache.tape;
    compute(cache.state.size() + cache.tape.size() + (1u << 18), n_threads, [&](ggml_context * ctx) {
        ggml_tensor * state = tensor_2d(ctx, cache.state, sh.state(), sh.n_cells);
        tape = tensor_2d(ctx, cache.tape, sh.tape(), sh.n_cells);
        return ggml_gated_delta_net_replay(ctx, state, tape, tree_rows(ctx, trees, sh.n_max), sh.dk, sh.H_k, sh.H_v, sh.kda);
    }, [&](ggml_tensor * out) {
        cache.state = floats_of(out);
        check_bits((const float *) tape->data, before.data(), before.size(), "tape after replay", sh.id());
    });
}

// one token of one sequence through upstream's op: returns the outputs, advances the state
static Floats run_plain(const Shape & sh, Floats & state, const Node & node) {
    Floats o;
    compute(3*state.size() + (1u << 16), 1, [&](ggml_context * ctx) {
        Inputs in = inputs(ctx, sh, { { node } });
        ggml_tensor * s = ggml_reshape_4d(ctx, tensor_2d(ctx, state, sh.state(), 1), sh.dk, sh.dk, sh.H_v, 1);
        return ggml_gated_delta_net(ctx, in.q, in.k, in.v, in.g, in.beta, s, 1);
    }, [&](ggml_tensor * out) {
        const float * p = (const float *) out->data;
        o.assign(p, p + sh.H_v*sh.dk);
        std::copy(p + sh.H_v*sh.dk, p + sh.H_v*sh.dk + sh.state(), state.begin());
    });
    return o;
}

// ---------------------------------------------------------------- float64, with bounds of the error of float32
//
// The recurrence in float64, and for every node how far float32 may be off: u = 2^-24, a sum of n products with magnitudes
// that add up to a is off by at most n u a, exp and each product of decays by a few u (4 are granted), and an error of d
// is passed on as it is in exact arithmetic. A step multiplies S by exp(g) and by I - beta k k^T, neither of which
// enlarges an error (g <= 0, |k| = 1, 0 <= beta <= 1), so an error of a row of the state, measured by its length, stays at
// most what it is. Terms in u^2 are left to the factor in within().

using Doubles = std::vector<double>;

struct Exact {
    Doubles state;        // [H_v][dk rows][dk], transposed as in the op
    Doubles state_error;  // [H_v*dk]: of a row, its length
};

struct ExactNode {
    Doubles o, o_error;  // [H_v*dk]
    Exact   after;       // of the state after this node
};

static constexpr double u = 0x1.0p-24;

static bool within(double error, double bound) { return error <= 1.01*bound + 1e-30; }

static std::vector<ExactNode> exact_tree(const Shape & sh, const Exact & base, const Nodes & nodes, const Parents & parents, ggml_gdn_tree_form form) {
    const int dk = sh.dk, N = (int) nodes.size();
    const double scale = 1/std::sqrt((double) dk);
    std::vector<ExactNode> res(N);
    std::vector<Doubles> d(N, Doubles(sh.H_v*dk)), d_error(N, Doubles(sh.H_v*dk));
    for (int n = 0; n < N; n++) {
        const Node & x = nodes[n];
        const std::vector<int> path = path_to(parents, n);
        const int L = (int) path.size() - 1;
        res[n].after = L == 0 ? base : res[parents[n]].after;
        res[n].o.resize(sh.H_v*dk);
        res[n].o_error.resize(sh.H_v*dk);
        for (int h = 0; h < sh.H_v; h++) {
            const float * k = &x.k[(h % sh.H_k)*dk], * q = &x.q[(h % sh.H_k)*dk];
            const auto decay = [&](int node, int i) { return std::exp((double) nodes[node].g[sh.kda ? h*dk + i : h]); };

            // the coefficients of the chunk form: of every ancestor and, with decays since the root, of the base
            Doubles kk(L + 1), qk(L + 1), kk_abs(L + 1), qk_abs(L + 1), root(dk, 1.0);
            for (int m = L; m >= 0; m--) {
                const float * km = &nodes[path[m]].k[(h % sh.H_k)*dk];
                for (int i = 0; i < dk; i++) {
                    kk[m]     += k[i]*root[i]*km[i];
                    qk[m]     += q[i]*root[i]*km[i];
                    kk_abs[m] += std::fabs(k[i]*root[i]*km[i]);
                    qk_abs[m] += std::fabs(q[i]*root[i]*km[i]);
                    root[i]   *= decay(path[m], i);
                }
            }
            for (int j = 0; j < dk; j++) {
                const int row = h*dk + j;
                double * s  = &res[n].after.state[row*dk];
                double * se = &res[n].after.state_error[row];

                double s0k = 0, s0q = 0;  // sums of magnitudes with the base
                for (int i = 0; i < dk; i++) {
                    s0k += std::fabs(base.state[row*dk + i]*root[i]*k[i]);
                    s0q += std::fabs(base.state[row*dk + i]*root[i]*q[i]);
                }
                double sk = 0, sk_abs = 0, length = 0, decay_max = 0;
                for (int i = 0; i < dk; i++) {
                    s[i]   *= decay(n, i);
                    sk     += s[i]*k[i];
                    sk_abs += std::fabs(s[i]*k[i]);
                    length += s[i]*s[i];
                    decay_max = std::max(decay_max, decay(n, i));
                }
                const double v  = x.v[row];
                const double dn = x.beta[h]*(v - sk);
                double sq = 0, sq_abs = 0;
                for (int i = 0; i < dk; i++) {
                    s[i]   += k[i]*dn;
                    sq     += s[i]*q[i];
                    sq_abs += std::fabs(s[i]*q[i]);
                }
                d[n][row] = dn;
                length    = std::sqrt(length) + std::fabs(dn);

                double e;  // of d beyond what the error of the base causes
                if (form == GGML_GDN_TREE_ROW) {
                    e   = x.beta[h]*u*((dk + 2)*sk_abs + 2*std::fabs(v)) + 2*u*std::fabs(dn);
                    *se = decay_max*(*se) + e + 4*u*length;
                    res[n].o_error[row] = scale*(*se + (dk + 2)*u*sq_abs);
                } else {
                    double dm_abs = 0, qm_abs = 0, carried = 0, q_carried = 0;
                    for (int m = 0; m < L; m++) {
                        dm_abs    += kk_abs[m]*std::fabs(d[path[m]][row]);
                        qm_abs    += qk_abs[m]*std::fabs(d[path[m]][row]);
                        carried   += std::fabs(kk[m])*d_error[path[m]][row];
                        q_carried += std::fabs(qk[m])*d_error[path[m]][row];
                    }
                    qm_abs    += qk_abs[L]*std::fabs(dn);
                    const double n_rounds = dk + L + 4*(L + 1) + 4;  // product over dk, sum over ancestors, decays, the rest
                    e = x.beta[h]*(u*n_rounds*(std::fabs(v) + s0k + dm_abs) + carried) + 2*u*std::fabs(dn);
                    q_carried += std::fabs(qk[L])*e;
                    res[n].o_error[row] = scale*(u*n_rounds*(s0q + qm_abs) + q_carried + base.state_error[row]);
                    *se = decay_max*(*se) + e + 4*u*length;
                }
                d_error[n][row]  = e;
                res[n].o[row]    = sq*scale;
            }
        }
    }
    return res;
}

static double worst_ratio = 0;  // error over bound

static bool check_exact(const float * x, const Doubles & exact, const Doubles & bound, const char * quantity, const std::string & id) {
    for (size_t i = 0; i < exact.size(); i++) {
        const double error = std::fabs(x[i] - exact[i]);
        if (bound[i] > 0) { worst_ratio = std::max(worst_ratio, error/bound[i]); }
        if (!within(error, bound[i])) {
            char buf[160];
            snprintf(buf, sizeof(buf), ": %s is off by %.2e at %zu, may be by %.2e", quantity, error, i, bound[i]);
            return check(false, id + buf);
        }
    }
    return check(true, "");
}

static bool check_state(const Shape & sh, const float * x, const Exact & exact, const std::string & id) {
    for (int row = 0; row < sh.H_v*sh.dk; row++) {
        double sq = 0;
        for (int i = 0; i < sh.dk; i++) {
            sq += std::pow(x[row*sh.dk + i] - exact.state[row*sh.dk + i], 2);
        }
        if (exact.state_error[row] > 0) { worst_ratio = std::max(worst_ratio, std::sqrt(sq)/exact.state_error[row]); }
        if (!within(std::sqrt(sq), exact.state_error[row])) {
            char buf[160];
            snprintf(buf, sizeof(buf), ": gdn_state is off by %.2e in row %d, may be by %.2e", std::sqrt(sq), row, exact.state_error[row]);
            return check(false, id + buf);
        }
    }
    return check(true, "");
}

// ---------------------------------------------------------------- the tests

static const float * cell_of(const Shape & sh, const Cache & c, int cell) { return &c.state[(size_t) cell*sh.state()]; }

struct Case {
    Shape       shape;
    std::string kind;
    int         N, n_seqs, n_threads;
    Decay       decay;
    std::string id() const {
        static const char * const decays[] = { "mild", "strong", "none", "mixed" };
        return shape.id() + "-" + kind + "-n" + std::to_string(N) + "-seqs" + std::to_string(n_seqs) + "-" + decays[decay] + "-t" + std::to_string(n_threads);
    }
};

static void test_case(const Case & c, ggml_gdn_tree_form form, Rng & rng) {
    const Shape & sh = c.shape;
    const std::string id = c.id() + (form == GGML_GDN_TREE_ROW ? "-row" : "-chunk");
    const int HD = sh.H_v*sh.dk;

    const std::vector<int> cells = random_cells(c.n_seqs, sh.n_cells, rng);
    Cache cache(sh, rng);

    // a first tree, so that there is a path to fold in
    std::vector<Tree>  trees;
    std::vector<Nodes> nodes;
    const int n_first = random_int(rng, 1, sh.n_max);
    for (int s = 0; s < c.n_seqs; s++) {
        trees.push_back({ cells[s], {}, make_tree("random", n_first, rng) });
        nodes.push_back(random_nodes(sh, n_first, c.decay, rng));
    }
    const Floats first = cache.state;
    run_tree(sh, cache, trees, nodes, form, c.n_threads);
    check_bits(cache.state.data(), first.data(), first.size(), "gdn_state after a verify without a path", id);

    std::vector<Floats>  plain(c.n_seqs);   // committed state of each sequence, by upstream's op
    std::vector<Exact>   exact(c.n_seqs);   // and in float64
    for (int s = 0; s < c.n_seqs; s++) {
        const float * p = cell_of(sh, cache, cells[s]);
        plain[s].assign(p, p + sh.state());
        exact[s] = { Doubles(p, p + sh.state()), Doubles(HD, 0.0) };
        if (random_int(rng, 0, 3) != 0) {
            trees[s].path = path_to(trees[s].parents, random_int(rng, 0, n_first - 1));
        }
        for (int n : trees[s].path) {
            run_plain(sh, plain[s], nodes[s][n]);
        }
        if (!trees[s].path.empty()) {
            exact[s] = exact_tree(sh, exact[s], nodes[s], trees[s].parents, form)[trees[s].path.back()].after;
        }
        trees[s].parents = make_tree(c.kind, c.N, rng);
        nodes[s]         = random_nodes(sh, c.N, c.decay, rng);
    }

    Cache base = cache;
    const Floats o = run_tree(sh, cache, trees, nodes, form, c.n_threads);

    for (int s = 0; s < c.n_seqs; s++) {
        if (form == GGML_GDN_TREE_ROW) {
            check_bits(cell_of(sh, cache, cells[s]), plain[s].data(), plain[s].size(), "gdn_state after the fold", id);
        }
        check_state(sh, cell_of(sh, cache, cells[s]), exact[s], id + " after the fold");
    }
    for (int cell = 0; cell < sh.n_cells; cell++) {
        if (std::find(cells.begin(), cells.end(), cell) == cells.end()) {
            check_bits(cell_of(sh, cache, cell), cell_of(sh, base, cell), sh.state(), "gdn_state of an unused cell", id);
            check_bits(&cache.tape[(size_t) cell*sh.tape()], &base.tape[(size_t) cell*sh.tape()], sh.tape(), "tape of an unused cell", id);
        }
    }

    // every root-to-node path: outputs, and the state after committing it
    for (int s = 0; s < c.n_seqs; s++) {
        std::vector<Floats> state(c.N);
        const std::vector<ExactNode> expected = exact_tree(sh, exact[s], nodes[s], trees[s].parents, form);
        for (int n = 0; n < c.N; n++) {
            const int p = trees[s].parents[n];
            state[n]    = p < 0 ? plain[s] : state[p];
            const Floats  o32 = run_plain(sh, state[n], nodes[s][n]);
            const float * on  = &o[((size_t) s*c.N + n)*HD];
            if (form == GGML_GDN_TREE_ROW) {
                check_bits(on, o32.data(), HD, "output of a node", id);
            }
            check_exact(on, expected[n].o, expected[n].o_error, "output", id + " node " + std::to_string(n));
        }
        std::vector<int> leaves = { c.N - 1, random_int(rng, 0, c.N - 1), 0 };
        for (int n : leaves) {
            Cache after = cache;
            run_replay(sh, after, { { cells[s], path_to(trees[s].parents, n), {} } }, c.n_threads);
            if (form == GGML_GDN_TREE_ROW) {
                check_bits(cell_of(sh, after, cells[s]), state[n].data(), sh.state(), "gdn_state after replay", id);
            }
            check_state(sh, cell_of(sh, after, cells[s]), expected[n].after, id + " after replay");
        }
    }

    // a node is blind to all but its ancestors: the path alone, in one call for one sequence, gives the same bits
    for (int s = 0; s < c.n_seqs; s++) {
        for (int n : { c.N - 1, random_int(rng, 0, c.N - 1) }) {
            const std::vector<int> path = path_to(trees[s].parents, n);
            Cache again = base;
            const Floats op = run_tree(sh, again, { { cells[s], trees[s].path, chain_of(path.size()) } }, { pick(nodes[s], path) }, form, random_int(rng, 1, 3));
            for (size_t i = 0; i < path.size(); i++) {
                check_bits(&o[((size_t) s*c.N + path[i])*HD], &op[i*HD], HD, "output of a node with and without other branches", id);
            }
            check_bits(cell_of(sh, cache, cells[s]), cell_of(sh, again, cells[s]), sh.state(), "gdn_state with and without other branches", id);
        }
    }
}

// many steps of verify and accept against plain decoding of the accepted tokens
static void test_drift(const Shape & sh, int n_steps, ggml_gdn_tree_form form, int n_threads, Decay decay, Rng & rng) {
    const std::string id = sh.id() + "-drift-" + std::to_string(n_steps) + (form == GGML_GDN_TREE_ROW ? "-row" : "-chunk");
    const int HD = sh.H_v*sh.dk, n_seqs = 2;
    const std::vector<int> cells = random_cells(n_seqs, sh.n_cells, rng);
    Cache cache(sh, rng);
    std::vector<Tree>    trees(n_seqs);
    std::vector<Floats>  plain(n_seqs);
    std::vector<Exact>   exact(n_seqs);
    for (int s = 0; s < n_seqs; s++) {
        trees[s].cell = cells[s];
        plain[s].assign(cell_of(sh, cache, cells[s]), cell_of(sh, cache, cells[s]) + sh.state());
        exact[s] = { Doubles(plain[s].begin(), plain[s].end()), Doubles(HD, 0.0) };
    }
    double err = 0, err_plain = 0, bound = 0;
    for (int step = 0; step < n_steps; step++) {
        const int N = random_int(rng, 1, sh.n_max);
        std::vector<Nodes> nodes(n_seqs);
        for (int s = 0; s < n_seqs; s++) {
            trees[s].parents = make_tree(tree_kinds[random_int(rng, 0, 4)], N, rng);
            nodes[s] = random_nodes(sh, N, decay, rng);
        }
        const Floats o = run_tree(sh, cache, trees, nodes, form, n_threads);
        for (int s = 0; s < n_seqs; s++) {
            trees[s].path = path_to(trees[s].parents, random_int(rng, 0, N - 1));
            const Nodes accepted = pick(nodes[s], trees[s].path);
            const std::vector<ExactNode> expected = exact_tree(sh, exact[s], accepted, chain_of(accepted.size()), form);
            exact[s] = expected.back().after;
            for (size_t t = 0; t < accepted.size(); t++) {
                const int     n   = trees[s].path[t];
                const Floats  o32 = run_plain(sh, plain[s], nodes[s][n]);
                const float * on  = &o[((size_t) s*N + n)*HD];
                if (form == GGML_GDN_TREE_ROW && !check_bits(on, o32.data(), HD, "output of an accepted node", id + " step " + std::to_string(step))) {
                    return;
                }
                if (!check_exact(on, expected[t].o, expected[t].o_error, "output", id + " step " + std::to_string(step))) {
                    return;
                }
                for (int i = 0; i < HD; i++) {
                    err       = std::max(err,       std::fabs(on[i]  - expected[t].o[i]));
                    err_plain = std::max(err_plain, std::fabs(o32[i] - expected[t].o[i]));
                    bound     = std::max(bound,     expected[t].o_error[i]);
                }
            }
        }
        if (step % 7 == 0) {  // a flush in between
            run_replay(sh, cache, trees, n_threads);
            for (int s = 0; s < n_seqs; s++) {
                trees[s].path.clear();
                if (form == GGML_GDN_TREE_ROW) {
                    check_bits(cell_of(sh, cache, cells[s]), plain[s].data(), sh.state(), "gdn_state", id + " step " + std::to_string(step));
                }
            }
        }
    }
    printf("%s: max error of outputs %.2e, of plain decoding %.2e, bound %.2e\n", id.c_str(), err, err_plain, bound);
    // the bound adds up what in truth averages out: nor may the error be another than that of plain decoding
    check(err <= 8*err_plain, id + ": drifted by " + std::to_string(err) + ", plain decoding by " + std::to_string(err_plain));
}

int main(int argc, char ** argv) {
    const bool quick = argc > 1 && std::string(argv[1]) == "quick";
    Rng rng(20240611);

    for (ggml_gdn_tree_form form : { GGML_GDN_TREE_ROW, GGML_GDN_TREE_CHUNK }) {
        worst_ratio = 0;
        for (int dk : { 4, 12, 20, 32, 64, 100, 128 }) {
            for (bool kda : { false, true }) {
                for (const char * kind : tree_kinds) {
                    for (int rep = 0; rep < (quick ? 1 : 3); rep++) {
                        static const int sizes[] = { 1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 24, 31, 33, 48, 63, 64 };
                        static const int heads[][2] = { { 1, 1 }, { 1, 2 }, { 2, 4 }, { 2, 6 }, { 3, 3 }, { 4, 8 } };
                        const int * h = heads[random_int(rng, 0, dk >= 100 ? 3 : 5)];
                        const int   N = sizes[random_int(rng, 0, dk >= 100 ? 12 : 15)];
                        const int   n_seqs = random_int(rng, 1, 4);
                        Case c = { { dk, h[0], h[1], std::min(64, N + random_int(rng, 0, 9)), n_seqs + random_int(rng, 0, 2), kda },
                                   kind, N, n_seqs, random_int(rng, 1, 3), (Decay) random_int(rng, MILD, MIXED) };
                        test_case(c, form, rng);
                    }
                }
            }
        }
        printf("%s form: max error over its bound %.3f\n", form == GGML_GDN_TREE_ROW ? "row" : "chunk", worst_ratio);
        const int n_steps = quick ? 20 : 500;
        test_drift({ 16,  2, 4, 12, 3, false }, n_steps, form, 2, MILD,  rng);
        test_drift({ 64,  1, 2, 16, 3, false }, n_steps, form, 2, MIXED, rng);
        test_drift({ 32,  2, 2,  9, 2, true  }, n_steps, form, 1, MIXED, rng);
        test_drift({ 128, 1, 2, 16, 2, false }, n_steps, form, 2, NONE,  rng);
    }
    return finish("gated_delta_net_tree");
}
