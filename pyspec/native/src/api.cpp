// The C boundary: unpacks arguments, checks handles, catches everything.
#include "pyspec.h"

#include "engine.h"
#include "error.h"
#include "log.h"
#include "ngram.h"
#include "pilot.h"
#include "sampler.h"

#include <climits>
#include <optional>

#ifndef PYSPEC_VERSION
#    define PYSPEC_VERSION "0.0.0+unbuilt"
#endif

using namespace pyspec;

struct pyspec_engine {
    Verbose verbose;
    Engine  engine;

    pyspec_engine(std::shared_ptr<Model> model, const pyspec_engine_params & params)
        : verbose(params.verbose), engine(std::move(model), params) {}
};

struct pyspec_sampler {
    Sampler sampler;
};

struct pyspec_ngram {
    Ngram ngram;
};

struct pyspec_calibration {
    Calibration calibration;
};

namespace {

Engine & of(pyspec_engine * e) {
    if (!e) {
        fail(PYSPEC_ERR_ARGUMENT, "engine is NULL");
    }
    return e->engine;
}

const Engine & of(const pyspec_engine * e) {
    return of(const_cast<pyspec_engine *>(e));
}

Sampler & of(pyspec_sampler * s) {
    if (!s) {
        fail(PYSPEC_ERR_ARGUMENT, "sampler is NULL");
    }
    return s->sampler;
}

Ngram & of(pyspec_ngram * g) {
    if (!g) {
        fail(PYSPEC_ERR_ARGUMENT, "ngram is NULL");
    }
    return g->ngram;
}

Calibration & of(pyspec_calibration * c) {
    if (!c) {
        fail(PYSPEC_ERR_ARGUMENT, "calibration is NULL");
    }
    return c->calibration;
}

// The text of `g` with more tokens behind it; after a failure it is empty or what it was.
Ngram & with_appended(pyspec_ngram * g, int32_t n_new, const int32_t * new_tokens) {
    Ngram & ngram = of(g);
    if (n_new < 0 || (n_new > 0 && !new_tokens)) {
        fail(PYSPEC_ERR_ARGUMENT, "ngram: %s", n_new < 0 ? "a negative number of tokens" : "a pointer is NULL");
    }
    const int64_t size = ngram.size() + (int64_t) n_new;
    if (size < 1 || size > INT32_MAX) {
        fail(PYSPEC_ERR_ARGUMENT, "ngram: a text of %lld tokens", (long long) size);
    }
    try {
        ngram.append(new_tokens, n_new);
    } catch (...) {
        ngram.clear(); // half of it may be there
        throw;
    }
    return ngram;
}

template <typename T> T & out(T * pointer, const char * name) {
    if (!pointer) {
        fail(PYSPEC_ERR_ARGUMENT, "%s is NULL", name);
    }
    return *pointer;
}

} // namespace

extern "C" {

// ---- process ----

const char * pyspec_last_error(void) {
    return last_error();
}

pyspec_status pyspec_last_status(void) {
    return last_status();
}

const char * pyspec_version(void) {
    return PYSPEC_VERSION;
}

int32_t pyspec_abi(void) {
    return PYSPEC_ABI;
}

// ---- engine ----

pyspec_engine_params pyspec_engine_default_params(void) {
    pyspec_engine_params p{};
    p.n_seq_max    = 1;
    p.max_nodes    = 16;
    p.n_gpu_layers = -1;
    p.split_mode   = LLAMA_SPLIT_MODE_LAYER;
    p.flash_attn   = -1;
    p.type_k       = -1;
    p.type_v       = -1;
    p.draft_type_k = -1;
    p.draft_type_v = -1;
    p.use_mmap     = true;
    p.offload_kqv  = true;
    return p;
}

pyspec_status pyspec_engine_open(const char * path, const pyspec_engine_params * params, bool (*progress)(float, void *),
                                 void * user, pyspec_engine ** result) {
    return guard([&] {
        out(result, "out") = nullptr;
        const pyspec_engine_params & p = out(params, "params");
        const Verbose                verbose(p.verbose); // already while loading
        *result = new pyspec_engine(Model::load(path, p, progress, user), p);
    });
}

pyspec_status pyspec_engine_attach(void * model, const pyspec_engine_params * params, pyspec_engine ** result) {
    return guard([&] {
        out(result, "out") = nullptr;
        *result = new pyspec_engine(Model::attach((llama_model *) model), out(params, "params"));
    });
}

void pyspec_engine_close(pyspec_engine * e) {
    guard([&] {
        const LogScope log; // llama.cpp talks while it frees
        delete e;
    });
}

pyspec_status pyspec_engine_info(const pyspec_engine * e, pyspec_info * info) {
    return guard([&] { of(e).fill(out(info, "out")); });
}

void * pyspec_engine_model(pyspec_engine * e) {
    return guard_value<void *>(nullptr, [&] { return of(e).model->get(); });
}

void * pyspec_engine_context(pyspec_engine * e) {
    return guard_value<void *>(nullptr, [&] { return of(e).context(); });
}

void pyspec_engine_abort(pyspec_engine * e, bool abort) {
    guard([&] { of(e).abort(abort); });
}

pyspec_status pyspec_engine_set_threads(pyspec_engine * e, int32_t n_threads) {
    return guard([&] { of(e).set_threads(n_threads); });
}

void pyspec_engine_timings(pyspec_engine * e, pyspec_timings * timings, bool reset) {
    guard([&] {
        const pyspec_timings now = of(e).take_timings(reset);
        if (timings) {
            *timings = now;
        }
    });
}

// ---- sequences ----

int32_t pyspec_seq_length(pyspec_engine * e, int32_t seq) {
    int32_t             length = 0;
    const pyspec_status status = guard([&] { length = of(e).length(seq); });
    return status == PYSPEC_OK ? length : (int32_t) status;
}

pyspec_status pyspec_seq_reset(pyspec_engine * e, int32_t seq) {
    return guard([&] { of(e).reset(seq); });
}

pyspec_status pyspec_seq_copy(pyspec_engine * e, int32_t src, int32_t dst) {
    return guard([&] { of(e).copy(src, dst); });
}

int64_t pyspec_seq_save(pyspec_engine * e, int32_t seq, void * buf, size_t size) {
    int64_t             written = 0;
    const pyspec_status status  = guard([&] { written = (int64_t) of(e).save(seq, buf, size); });
    return status == PYSPEC_OK ? written : (int64_t) status;
}

pyspec_status pyspec_seq_restore(pyspec_engine * e, int32_t seq, const void * buf, size_t size) {
    return guard([&] { of(e).restore(seq, buf, size); });
}

// ---- decode ----

pyspec_status pyspec_prefill(pyspec_engine * e, int32_t seq, const int32_t * tokens, int32_t n) {
    return guard([&] { of(e).prefill(seq, tokens, n); });
}

pyspec_status pyspec_verify(pyspec_engine * e, const pyspec_tree * trees, int32_t n_trees, bool greedy) {
    return guard([&] { of(e).verify(trees, n_trees, greedy); });
}

pyspec_status pyspec_commit(pyspec_engine * e, int32_t seq, const int32_t * path, int32_t n) {
    return guard([&] { of(e).commit(seq, path, n); });
}

const float * pyspec_logits(pyspec_engine * e, int32_t seq, int32_t node) {
    return guard_value<const float *>(nullptr, [&] { return of(e).logits(seq, node); });
}

const float * pyspec_hidden(pyspec_engine * e, int32_t seq, int32_t node) {
    return guard_value<const float *>(nullptr, [&] { return of(e).hidden(seq, node); });
}

// ---- sampling ----

pyspec_sampler_params pyspec_sampler_default_params(void) {
    pyspec_sampler_params p{};
    p.top_p          = 1.0f;
    p.typical_p      = 1.0f;
    p.penalty_repeat = 1.0f;
    return p;
}

pyspec_status pyspec_sampler_create(pyspec_engine * e, const pyspec_sampler_params * p, pyspec_sampler ** result) {
    return guard([&] {
        out(result, "out") = nullptr;
        *result = new pyspec_sampler{ Sampler(of(e).model, out(p, "params"), (int32_t) of(e).context_size()) };
    });
}

pyspec_status pyspec_sampler_clone(const pyspec_sampler * s, pyspec_sampler ** result) {
    return guard([&] {
        out(result, "out") = nullptr;
        *result = new pyspec_sampler{ Sampler(of(const_cast<pyspec_sampler *>(s))) };
    });
}

void pyspec_sampler_close(pyspec_sampler * s) {
    guard([&] { delete s; });
}

bool pyspec_sampler_greedy(const pyspec_sampler * s) {
    return s && s->sampler.greedy();
}

void pyspec_sampler_reset(pyspec_sampler * s) {
    guard([&] { of(s).reset(); });
}

pyspec_status pyspec_sampler_accept_prompt(pyspec_sampler * s, const int32_t * tokens, int32_t n) {
    return guard([&] { of(s).accept_prompt(tokens, n); });
}

pyspec_status pyspec_sample(pyspec_engine * e, pyspec_sampler * s, int32_t seq, int32_t node, int32_t * token) {
    return guard([&] {
        Sampler & sampler = of(s);
        out(token, "token");
        Stopwatch watch(of(e).timings.sample);
        *token = of(e).draw(sampler, seq, node);
    });
}

pyspec_status pyspec_accept(pyspec_engine * e, pyspec_sampler * s, int32_t seq, int32_t max_path, bool stop_eog,
                            int32_t * path, int32_t * n_path, int32_t * bonus) {
    return guard([&] {
        Engine &  engine  = of(e);
        Sampler & sampler = of(s);
        out(path, "path");
        out(n_path, "n_path") = 0;
        out(bonus, "bonus");
        if (max_path < 1) {
            fail(PYSPEC_ERR_ARGUMENT, "max_path is %d; it must be at least 1", max_path);
        }
        int32_t drawn[GGML_TREE_MAX_NODES];
        *n_path = engine.walk(sampler, seq, max_path, stop_eog, path, drawn);
        *bonus  = drawn[*n_path - 1];
    });
}

pyspec_status pyspec_coast(pyspec_engine * e, pyspec_sampler * s, int32_t seq, int32_t root, int32_t max_steps,
                           int32_t max_tokens, bool stop_eog, int64_t max_us, pyspec_pilot * rules, int32_t n_new,
                           const int32_t * new_tokens, pyspec_coast_steps * steps) {
    return guard([&] {
        pyspec_coast_steps & to = out(steps, "steps");
        to.n_steps              = 0;
        if (max_steps < 1 || max_tokens < 1) {
            fail(PYSPEC_ERR_ARGUMENT, "max_steps is %d and max_tokens %d; both must be at least 1", max_steps, max_tokens);
        }
        if (!to.nodes || !to.accepted || !to.us || !to.tokens || !to.parents || !to.depths || !to.log_probs ||
            !to.path || !to.drawn) {
            fail(PYSPEC_ERR_ARGUMENT, "steps: a pointer is NULL");
        }
        std::optional<Pilot> pilot;
        if (rules) {
            pilot.emplace(*rules, with_appended(rules->index, n_new, new_tokens), of(rules->calibration));
        }
        const pyspec_timings before = of(e).timings;
        of(e).coast(of(s), seq, root, max_steps, max_tokens, stop_eog, max_us, pilot ? &*pilot : nullptr, to);
        to.sample_us = of(e).timings.sample - before.sample;
        to.commit_us = of(e).timings.commit - before.commit;
    });
}

// ---- drafting ----

pyspec_status pyspec_top(pyspec_engine * e, int32_t seq, int32_t node, int32_t top_k, int32_t * tokens,
                         float * log_probs) {
    return guard([&] { of(e).top(seq, node, top_k, tokens, log_probs); });
}

pyspec_status pyspec_mtp_draft(pyspec_engine * e, int32_t n, const int32_t * seqs, const int32_t * roots,
                               const pyspec_mtp_drafts * drafts) {
    return guard([&] { of(e).mtp_draft(n, seqs, roots, out(drafts, "drafts")); });
}

pyspec_status pyspec_dflash_open(pyspec_engine * e, const char * path, pyspec_dflash_info * info) {
    return guard([&] {
        const pyspec_dflash_info facts = of(e).dflash_open(path);
        if (info) {
            *info = facts;
        }
    });
}

pyspec_status pyspec_dflash_listen(pyspec_engine * e, bool on) {
    return guard([&] { of(e).dflash_listen(on); });
}

pyspec_status pyspec_dflash_draft(pyspec_engine * e, int32_t n, const int32_t * seqs, const int32_t * roots,
                                  int32_t depth, int32_t top_k, int32_t * tokens, float * log_probs, float * pairs,
                                  float * confidence) {
    return guard([&] { of(e).dflash_draft(n, seqs, roots, depth, top_k, tokens, log_probs, pairs, confidence); });
}

pyspec_status pyspec_draft_head_init(pyspec_engine * e, int32_t n_rows) {
    return guard([&] { of(e).draft_head().init(n_rows); });
}

pyspec_status pyspec_draft_head_add(pyspec_engine * e, int32_t n, const int32_t * tokens, const void * rows,
                                    size_t size) {
    return guard([&] { of(e).draft_head().add(n, tokens, rows, size); });
}

pyspec_status pyspec_ngram_open(pyspec_ngram ** result) {
    return guard([&] {
        out(result, "out") = nullptr;
        *result            = new pyspec_ngram();
    });
}

void pyspec_ngram_close(pyspec_ngram * g) {
    delete g;
}

void pyspec_ngram_clear(pyspec_ngram * g) {
    guard([&] { of(g).clear(); });
}

int32_t pyspec_ngram_draft(pyspec_ngram * g, int32_t n_new, const int32_t * new_tokens, int32_t depth,
                           int32_t max_nodes, int32_t * tokens, int32_t * parents, int32_t * depths,
                           float * log_probs) {
    int32_t             n      = 0;
    const pyspec_status status = guard([&] {
        if (!tokens || !parents || !depths || !log_probs) {
            fail(PYSPEC_ERR_ARGUMENT, "ngram: a pointer is NULL");
        }
        if (depth < 0 || depth > GGML_TREE_MAX_NODES || max_nodes < 1 || max_nodes > GGML_TREE_MAX_NODES) {
            fail(PYSPEC_ERR_ARGUMENT, "ngram: depth is %d and max_nodes %d; at most %d of both", depth, max_nodes,
                 GGML_TREE_MAX_NODES);
        }
        for (const Ngram::Node & node : with_appended(g, n_new, new_tokens).draft(depth, max_nodes)) {
            tokens[n]    = node.token;
            parents[n]   = node.parent;
            depths[n]    = node.depth;
            log_probs[n] = (float) node.log_prob;
            ++n;
        }
    });
    return status == PYSPEC_OK ? n : status;
}

pyspec_status pyspec_calibration_open(pyspec_calibration ** result) {
    return guard([&] {
        out(result, "out") = nullptr;
        *result            = new pyspec_calibration();
    });
}

void pyspec_calibration_close(pyspec_calibration * c) {
    delete c;
}

pyspec_status pyspec_calibration_values(pyspec_calibration * c, int32_t slot, int32_t n, const int32_t * parents,
                                        const int32_t * depths, const double * log_probs, const int32_t * firsts,
                                        double floor, double * values, int32_t * classes) {
    return guard([&] {
        if (slot < 0 || n < 1 || !parents || !depths || !log_probs || !firsts || !values || !classes) {
            fail(PYSPEC_ERR_ARGUMENT, "calibration: slot %d, %d nodes, or a pointer is NULL", slot, n);
        }
        for (int32_t i = 1; i < n; ++i) {
            if (parents[i] < 0 || parents[i] >= i || depths[i] < 1 || firsts[i] < 0 ||
                firsts[i] > Calibration::most_classes) {
                fail(PYSPEC_ERR_TREE, "calibration: node %d has parent %d, depth %d and first class %d", i, parents[i],
                     depths[i], firsts[i]);
            }
        }
        of(c).values(slot, { n, parents, depths, log_probs, firsts }, floor, values, classes);
    });
}

double pyspec_calibration_probability(pyspec_calibration * c, int32_t slot, int32_t kind, double log_prob) {
    return guard_value<double>(-1.0, [&] {
        if (slot < 0 || kind < 0) {
            fail(PYSPEC_ERR_ARGUMENT, "calibration: slot is %d and class %d", slot, kind);
        }
        return of(c).probability(slot, kind, log_prob);
    });
}

pyspec_status pyspec_calibration_observe(pyspec_calibration * c, int32_t slot, int32_t kind, bool hit) {
    return guard([&] { of(c).observe(slot, kind, hit); });
}

pyspec_status pyspec_calibration_learn(pyspec_calibration * c, int32_t slot, int32_t n, const int32_t * tokens,
                                       const int32_t * parents, const int32_t * classes, int32_t n_path,
                                       const int32_t * path, const int32_t * drawn) {
    return guard([&] {
        if (n < 1 || n_path < 1 || !tokens || !parents || !classes || !path || !drawn) {
            fail(PYSPEC_ERR_ARGUMENT, "calibration: %d nodes, %d of a path, or a pointer is NULL", n, n_path);
        }
        of(c).learn(slot, n, tokens, parents, classes, n_path, path, drawn);
    });
}

void pyspec_calibration_forget(pyspec_calibration * c, int32_t slot) {
    guard([&] { of(c).forget(slot); });
}

pyspec_status pyspec_pilot_gain(pyspec_pilot * p, int32_t n_new, const int32_t * new_tokens, double * gain,
                                int32_t * nodes, bool * gives_way) {
    return guard([&] {
        pyspec_pilot & rules = out(p, "pilot");
        out(gain, "gain");
        out(nodes, "nodes");
        out(gives_way, "gives_way");
        Pilot pilot(rules, with_appended(rules.index, n_new, new_tokens), of(rules.calibration));
        *nodes     = pilot.draft(rules.depth, rules.max_nodes).size();
        *gain      = pilot.gain();
        *gives_way = pilot.gives_way();
    });
}

// ---- text ----

int32_t pyspec_tokenize(pyspec_engine * e, const char * text, int32_t n_text, bool add_special, bool parse_special,
                        int32_t * tokens, int32_t max) {
    return guard_value<int32_t>(INT32_MIN, [&] {
        if (n_text < 0 || max < 0 || (n_text > 0 && !text) || (max > 0 && !tokens)) {
            fail(PYSPEC_ERR_ARGUMENT, "tokenize: %s", n_text < 0 || max < 0 ? "a negative size" : "a pointer is NULL");
        }
        const int32_t n = llama_tokenize(of(e).model->vocab(), text ? text : "", n_text, tokens, max, add_special, parse_special);
        if (n == INT32_MIN) {
            fail(PYSPEC_ERR_ARGUMENT, "text of %d bytes has too many tokens", n_text);
        }
        return n;
    });
}

int32_t pyspec_token_to_piece(pyspec_engine * e, int32_t token, bool special, char * buf, int32_t max) {
    return guard_value<int32_t>(INT32_MIN, [&] {
        const Model & model = *of(e).model;
        model.check_token(token, "token_to_piece");
        if (max < 0 || (max > 0 && !buf)) {
            fail(PYSPEC_ERR_ARGUMENT, "token_to_piece: %s", max < 0 ? "a negative size" : "buf is NULL");
        }
        return llama_token_to_piece(model.vocab(), token, buf, max, 0, special);
    });
}

bool pyspec_token_is_eog(pyspec_engine * e, int32_t token) {
    return guard_value<bool>(false, [&] {
        const Model & model = *of(e).model;
        model.check_token(token, "token_is_eog");
        return llama_vocab_is_eog(model.vocab(), token);
    });
}

const char * pyspec_chat_template(pyspec_engine * e) {
    return guard_value<const char *>(nullptr, [&] { return llama_model_chat_template(of(e).model->get(), nullptr); });
}

} // extern "C"
