// ggml_ssm_conv_tree and ggml_ssm_conv_replay against a float64 statement of the convolution and, bit for bit, against
// ggml_ssm_conv on the rows of every path.

#include "tree_cases.h"

#include <algorithm>
#include <cmath>

struct Shape {
    int channels, K, n_max, n_cells;
    int state() const { return channels*(K - 1); }
    int tape()  const { return channels*n_max; }
};

using Rows = std::vector<Floats>;  // inputs of the nodes of one sequence, [N][channels]

static Floats random_floats(size_t n, Rng & rng) {
    Floats f(n);
    for (float & y : f) { y = random_float(rng, -2, 2); }
    return f;
}

struct Cache {
    Floats state, tape;
    Cache(const Shape & sh, Rng & rng) : state(random_floats((size_t) sh.n_cells*sh.state(), rng)), tape(random_floats((size_t) sh.n_cells*sh.tape(), rng)) {}
};

// outputs [n_seqs][N][channels]; updates the cache. The rows of x are padded by `pad` floats
static Floats run_tree(const Shape & sh, Cache & cache, const Floats & w, const std::vector<Tree> & trees, const std::vector<Rows> & x, int n_threads, int pad) {
    const int S = (int) x.size(), N = (int) x[0].size();
    ggml_tensor * state = nullptr, * tape = nullptr;
    Floats y;
    compute(cache.state.size() + cache.tape.size() + w.size() + 2*(size_t) S*N*(sh.channels + pad), n_threads, [&](ggml_context * ctx) {
        ggml_tensor * all = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, sh.channels + pad, N, S);
        for (int s = 0; s < S; s++) {
            for (int n = 0; n < N; n++) {
                std::copy(x[s][n].begin(), x[s][n].end(), (float *) all->data + (size_t) (s*N + n)*(sh.channels + pad));
            }
        }
        state = tensor_2d(ctx, cache.state, sh.state(), sh.n_cells);
        tape  = tensor_2d(ctx, cache.tape,  sh.tape(),  sh.n_cells);
        return ggml_ssm_conv_tree(ctx, ggml_view_3d(ctx, all, sh.channels, N, S, all->nb[1], all->nb[2], 0), state, tape,
                tensor_2d(ctx, w, sh.K, sh.channels), tree_rows(ctx, trees, sh.n_max));
    }, [&](ggml_tensor * out) {
        y           = floats_of(out);
        cache.state = floats_of(state);
        cache.tape  = floats_of(tape);
    });
    return y;
}

static void run_replay(const Shape & sh, Cache & cache, const std::vector<Tree> & trees, int n_threads) {
    compute(cache.state.size() + cache.tape.size(), n_threads, [&](ggml_context * ctx) {
        return ggml_ssm_conv_replay(ctx, tensor_2d(ctx, cache.state, sh.state(), sh.n_cells), tensor_2d(ctx, cache.tape, sh.tape(), sh.n_cells),
                tree_rows(ctx, trees, sh.n_max), sh.K);
    }, [&](ggml_tensor * out) { cache.state = floats_of(out); });
}

// a chain through upstream's op: returns the outputs [n][channels], advances the window
static Floats run_plain(const Shape & sh, Floats & window, const Floats & w, const Rows & rows) {
    const int n = (int) rows.size(), n_in = sh.K - 1 + n;
    Floats y, in((size_t) n_in*sh.channels);
    for (int c = 0; c < sh.channels; c++) {
        for (int i = 0; i < n_in; i++) {
            in[(size_t) c*n_in + i] = i < sh.K - 1 ? window[c*(sh.K - 1) + i] : rows[i - (sh.K - 1)][c];
        }
        for (int i = 0; i < sh.K - 1; i++) {
            window[c*(sh.K - 1) + i] = in[(size_t) c*n_in + n + i];
        }
    }
    compute(3*in.size() + w.size(), 1, [&](ggml_context * ctx) {
        return ggml_ssm_conv(ctx, ggml_reshape_3d(ctx, tensor_2d(ctx, in, n_in, sh.channels), n_in, sh.channels, 1), tensor_2d(ctx, w, sh.K, sh.channels));
    }, [&](ggml_tensor * out) { y = floats_of(out); });
    return y;
}

static void test_case(const Shape & sh, const char * kind, int N, int n_seqs, int n_threads, Rng & rng) {
    const std::string id = "c" + std::to_string(sh.channels) + "-k" + std::to_string(sh.K) + "-" + kind + "-n" + std::to_string(N) +
                           "-seqs" + std::to_string(n_seqs) + "-t" + std::to_string(n_threads);
    const int C = sh.channels, pad = random_int(rng, 0, 5);
    const Floats w = random_floats((size_t) C*sh.K, rng);
    const std::vector<int> cells = random_cells(n_seqs, sh.n_cells, rng);
    Cache cache(sh, rng);
    std::vector<Tree>   trees;
    std::vector<Rows>   x(n_seqs);
    std::vector<Floats> window(n_seqs);

    auto new_rows = [&](int n) {
        Rows rows;
        for (int i = 0; i < n; i++) { rows.push_back(random_floats(C, rng)); }
        return rows;
    };
    const int n_first = random_int(rng, 1, sh.n_max);
    for (int s = 0; s < n_seqs; s++) {
        trees.push_back({ cells[s], {}, make_tree("random", n_first, rng) });
        x[s] = new_rows(n_first);
    }
    run_tree(sh, cache, w, trees, x, n_threads, pad);
    for (int s = 0; s < n_seqs; s++) {
        window[s].assign(&cache.state[(size_t) cells[s]*sh.state()], &cache.state[(size_t) cells[s]*sh.state()] + sh.state());
        if (random_int(rng, 0, 3) != 0) {
            trees[s].path = path_to(trees[s].parents, random_int(rng, 0, n_first - 1));
            Rows rows;
            for (int n : trees[s].path) { rows.push_back(x[s][n]); }
            run_plain(sh, window[s], w, rows);
        }
        trees[s].parents = make_tree(kind, N, rng);
        x[s] = new_rows(N);
    }
    const Cache base = cache;
    const Floats y = run_tree(sh, cache, w, trees, x, n_threads, pad);

    for (int cell = 0; cell < sh.n_cells; cell++) {
        const int s = (int) (std::find(cells.begin(), cells.end(), cell) - cells.begin());
        if (s == n_seqs) {
            check_bits(&cache.state[(size_t) cell*sh.state()], &base.state[(size_t) cell*sh.state()], sh.state(), "conv_state of an unused cell", id);
            check_bits(&cache.tape[(size_t) cell*sh.tape()], &base.tape[(size_t) cell*sh.tape()], sh.tape(), "tape of an unused cell", id);
            continue;
        }
        check_bits(&cache.state[(size_t) cell*sh.state()], window[s].data(), sh.state(), "conv_state after the fold", id);
        for (int n = 0; n < N; n++) {
            check_bits(&cache.tape[(size_t) cell*sh.tape() + n*C], x[s][n].data(), C, "tape", id);
            const std::vector<int> path = path_to(trees[s].parents, n);
            Rows rows;
            for (int i : path) { rows.push_back(x[s][i]); }
            Floats after = window[s];
            const Floats plain = run_plain(sh, after, w, rows);
            const float * yn = &y[((size_t) s*N + n)*C];
            check_bits(yn, &plain[(path.size() - 1)*C], C, "output of a node", id);
            for (int c = 0; c < C; c++) {
                double sum = 0, abs = 0;
                for (int i = 0; i < sh.K; i++) {
                    const int p = (int) path.size() - sh.K + i;
                    const double in = p >= 0 ? x[s][path[p]][c] : window[s][c*(sh.K - 1) + sh.K - 1 + p];
                    sum += in*w[c*sh.K + i];
                    abs += std::fabs(in*w[c*sh.K + i]);
                }
                // K products and K sums, each off by at most half an ulp of the sum of magnitudes
                check(std::fabs(yn[c] - sum) <= 2*sh.K*0x1.0p-24*abs, id + ": output of node " + std::to_string(n) + " against float64");
            }
            if (n % 5 == 0 || n == N - 1) {
                Cache replayed = cache;
                run_replay(sh, replayed, { { cells[s], path, {} } }, n_threads);
                check_bits(&replayed.state[(size_t) cell*sh.state()], after.data(), sh.state(), "conv_state after replay", id);
            }
        }
    }
}

int main() {
    Rng rng(7);
    for (int channels : { 1, 7, 16, 40, 131, 256, 1000 }) {
        for (int K : { 2, 3, 4, 5, 9, 16 }) {
            for (const char * kind : tree_kinds) {
                static const int sizes[] = { 1, 2, 3, 5, 8, 13, 16, 31, 64 };
                const int N      = sizes[random_int(rng, 0, channels > 200 ? 6 : 8)];
                const int n_seqs = random_int(rng, 1, 4);
                const Shape sh = { channels, K, std::min(64, N + random_int(rng, 0, 9)), n_seqs + random_int(rng, 0, 2) };
                test_case(sh, kind, N, n_seqs, random_int(rng, 1, 3), rng);
            }
        }
    }
    return finish("ssm_conv_tree");
}
