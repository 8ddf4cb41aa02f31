// The C interface on a model, made to be run under sanitizers: every call, every refusal of a bad argument.
//
//   test_native_engine [MODEL]     default: PYSPEC_TEST_MODEL, or the demo model
#include "native_check.h"

#include "pyspec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <thread>

namespace {

const char * model_path = nullptr;

struct Closer {
    void operator()(pyspec_engine * e) const { pyspec_engine_close(e); }
    void operator()(pyspec_sampler * s) const { pyspec_sampler_close(s); }
};
using EnginePtr  = std::unique_ptr<pyspec_engine, Closer>;
using SamplerPtr = std::unique_ptr<pyspec_sampler, Closer>;

#define CHECK_OK(call)                                                                                        \
    do {                                                                                                      \
        const pyspec_status status_ = (call);                                                                 \
        check::report(status_ == PYSPEC_OK, #call, status_ ? pyspec_last_error() : "", __FILE__, __LINE__);   \
    } while (0)

#define CHECK_STATUS(call, expected, part)     \
    do {                                       \
        CHECK((call) == (expected));           \
        CHECK_MESSAGE(pyspec_last_error(), part); \
    } while (0)

pyspec_engine_params small_params(uint32_t n_seq_max = 2, uint32_t max_nodes = 6) {
    pyspec_engine_params params = pyspec_engine_default_params();
    params.n_ctx                = 256;
    params.n_seq_max            = n_seq_max;
    params.max_nodes            = max_nodes;
    params.n_threads            = 1;
    params.n_gpu_layers         = 0;
    params.mtp                  = true;
    return params;
}

EnginePtr open(const pyspec_engine_params & params = small_params()) {
    pyspec_engine * e = nullptr;
    CHECK_OK(pyspec_engine_open(model_path, &params, nullptr, nullptr, &e));
    return EnginePtr(e);
}

SamplerPtr sampler(pyspec_engine * e, const pyspec_sampler_params & params = pyspec_sampler_default_params()) {
    pyspec_sampler * s = nullptr;
    CHECK_OK(pyspec_sampler_create(e, &params, &s));
    return SamplerPtr(s);
}

std::vector<int32_t> tokenize(pyspec_engine * e, const std::string & text) {
    const int32_t        needed = -pyspec_tokenize(e, text.data(), (int32_t) text.size(), false, false, nullptr, 0);
    std::vector<int32_t> tokens(std::max(needed, 0));
    CHECK(pyspec_tokenize(e, text.data(), (int32_t) text.size(), false, false, tokens.data(), needed) == needed);
    return tokens;
}

pyspec_status verify_chain(pyspec_engine * e, int32_t seq, const std::vector<int32_t> & tokens) {
    std::vector<int32_t> parents(tokens.size());
    std::iota(parents.begin(), parents.end(), -1);
    const pyspec_tree tree{ seq, (int32_t) tokens.size(), tokens.data(), parents.data() };
    return pyspec_verify(e, &tree, 1, false);
}

pyspec_status commit_chain(pyspec_engine * e, int32_t seq, int32_t n) {
    std::vector<int32_t> path(n);
    std::iota(path.begin(), path.end(), 0);
    return pyspec_commit(e, seq, path.data(), n);
}

int32_t n_vocab(pyspec_engine * e) {
    pyspec_info info;
    CHECK_OK(pyspec_engine_info(e, &info));
    return info.n_vocab;
}

int32_t best(const float * logits, int32_t n) {
    return (int32_t) (std::max_element(logits, logits + n) - logits);
}

} // namespace

TEST(speculation_equals_plain_decoding) {
    EnginePtr                  engine = open();
    pyspec_engine * const      e      = engine.get();
    const int32_t              vocab  = n_vocab(e);
    const std::vector<int32_t> prompt = tokenize(e, "def main(arguments):\n    for argument in arguments:\n");
    const int32_t              n      = 60;

    std::vector<int32_t> plain;
    CHECK_OK(pyspec_prefill(e, 0, prompt.data(), (int32_t) prompt.size() - 1));
    for (int32_t root = prompt.back(); (int32_t) plain.size() < n; root = plain.back()) {
        CHECK_OK(verify_chain(e, 0, { root }));
        plain.push_back(best(pyspec_logits(e, 0, 0), vocab));
        CHECK_OK(commit_chain(e, 0, 1));
    }

    SamplerPtr           greedy = sampler(e);
    std::vector<int32_t> emitted;
    int32_t              root = prompt.back();
    CHECK_OK(pyspec_prefill(e, 1, prompt.data(), (int32_t) prompt.size() - 1));
    while ((int32_t) emitted.size() < n) {
        const int32_t depth = 1 + (int32_t) emitted.size() % 5, seq = 1;
        int32_t       drafts[5 * 3], levels = 0, parents[5];
        float         log_probs[5 * 3];
        const pyspec_mtp_drafts out = { depth, 1, 3, 0.0f, &levels, parents, drafts, log_probs };
        CHECK_OK(pyspec_mtp_draft(e, 1, &seq, &root, &out));
        CHECK(levels == depth && parents[0] == -1);
        std::vector<int32_t> tokens = { root };
        for (int32_t i = 0; i < depth; ++i) {
            tokens.push_back(drafts[i * 3]);
            CHECK(log_probs[i * 3] >= log_probs[i * 3 + 1] && log_probs[i * 3] <= 0);
        }
        CHECK_OK(verify_chain(e, 1, tokens));
        int32_t path[6], n_path = 0, bonus = -1;
        CHECK_OK(pyspec_accept(e, greedy.get(), 1, n - (int32_t) emitted.size(), false, path, &n_path, &bonus));
        CHECK(std::isfinite(*pyspec_hidden(e, 1, n_path - 1)));
        CHECK_OK(pyspec_commit(e, 1, path, n_path));
        for (int32_t i = 1; i < n_path; ++i) {
            emitted.push_back(tokens[path[i]]);
        }
        emitted.push_back(bonus);
        root = bonus;
    }
    CHECK(emitted == plain);
    CHECK(pyspec_seq_length(e, 1) == (int32_t) prompt.size() - 1 + n);
}

namespace {

// Room for the steps of a coast, and what a pilot needs.
struct Coast {
    static constexpr int32_t most = 32;
    std::vector<int32_t>     nodes, accepted, us, tokens, parents, depths, path, drawn;
    std::vector<float>       log_probs;
    pyspec_coast_steps       steps{};

    Coast() : nodes(most), accepted(most), us(most) {
        for (auto * array : { &tokens, &parents, &depths, &path, &drawn }) {
            array->resize(64 * most);
        }
        log_probs.resize(64 * most);
        steps.nodes     = nodes.data();
        steps.accepted  = accepted.data();
        steps.us        = us.data();
        steps.tokens    = tokens.data();
        steps.parents   = parents.data();
        steps.depths    = depths.data();
        steps.log_probs = log_probs.data();
        steps.path      = path.data();
        steps.drawn     = drawn.data();
    }

    int32_t n_drawn() const { return std::accumulate(accepted.begin(), accepted.begin() + steps.n_steps, 0); }
};

struct PilotParts {
    pyspec_ngram *             index       = nullptr;
    pyspec_calibration *       calibration = nullptr;
    const std::vector<int32_t> sizes    = { 2, 3, 4, 6 };
    const std::vector<double>  costs_ms = { 0.01, 0.02, 0.03, 0.05 };
    pyspec_pilot               rules{};

    PilotParts() {
        CHECK_OK(pyspec_ngram_open(&index));
        CHECK_OK(pyspec_calibration_open(&calibration));
        rules.index         = index;
        rules.calibration   = calibration;
        rules.depth         = 5;
        rules.max_nodes     = 6;
        rules.root_ms       = 1.0;
        rules.column_ms     = 0.01;
        rules.n_sizes       = (int32_t) sizes.size();
        rules.sizes         = sizes.data();
        rules.costs_ms      = costs_ms.data();
        rules.fade          = 0.9;
        rules.recent_tokens = 1.0;
        rules.recent_ms     = 1.0;
    }
    ~PilotParts() {
        pyspec_ngram_close(index);
        pyspec_calibration_close(calibration);
    }
};

} // namespace

TEST(coasting_equals_single_steps) {
    EnginePtr                  engine = open();
    pyspec_engine * const      e      = engine.get();
    const std::vector<int32_t> prompt = tokenize(e, "a = 1\nb = 2\nc = 3\na = 1\nb = 2\nc = 3\na = 1\n");
    pyspec_sampler_params      sampling = pyspec_sampler_default_params();
    for (const float temp : { 0.0f, 1.0f }) {
        sampling.temp = temp;
        sampling.seed = 7;
        std::vector<int32_t> plain;
        SamplerPtr           one = sampler(e, sampling), other = sampler(e, sampling);
        CHECK_OK(pyspec_seq_reset(e, 0));
        CHECK_OK(pyspec_prefill(e, 0, prompt.data(), (int32_t) prompt.size() - 1));
        for (int32_t root = prompt.back(); plain.size() < 80; root = plain.back()) {
            int32_t path = 0, n_path = 0, bonus = -1;
            CHECK_OK(verify_chain(e, 0, { root }));
            CHECK_OK(pyspec_accept(e, one.get(), 0, 1, false, &path, &n_path, &bonus));
            CHECK_OK(commit_chain(e, 0, 1));
            plain.push_back(bonus);
        }
        for (const bool piloted : { false, true }) {
            Coast                coast;
            PilotParts           pilot;
            std::vector<int32_t> drawn, text = prompt;
            int32_t              drafted = 0;
            SamplerPtr           s       = sampler(e, sampling);
            CHECK_OK(pyspec_seq_reset(e, 1));
            CHECK_OK(pyspec_prefill(e, 1, prompt.data(), (int32_t) prompt.size() - 1));
            for (int32_t n_new = (int32_t) prompt.size(); drawn.size() < plain.size(); n_new = 0) {
                const int32_t left = (int32_t) (plain.size() - drawn.size());
                CHECK_OK(pyspec_coast(e, s.get(), 1, text.back(), 1 + left % Coast::most, left, false, 1000000,
                                      piloted ? &pilot.rules : nullptr, piloted ? n_new : 0, text.data(), &coast.steps));
                const int32_t n = coast.n_drawn();
                CHECK(coast.steps.n_steps >= 1 && coast.steps.n_steps <= 1 + left % Coast::most && n <= left);
                drawn.insert(drawn.end(), coast.drawn.begin(), coast.drawn.begin() + n);
                text.insert(text.end(), coast.drawn.begin(), coast.drawn.begin() + n);
                for (int32_t k = 0, at = 0; k < coast.steps.n_steps; at += coast.nodes[k++]) {
                    CHECK(coast.nodes[k] >= coast.accepted[k] && coast.nodes[k] <= 6 && coast.parents[at] == -1);
                    drafted += coast.nodes[k] - 1;
                }
            }
            CHECK(drawn == plain && (drafted > 0) == piloted);
            CHECK(pyspec_seq_length(e, 1) == pyspec_seq_length(e, 0));
            CHECK_OK(verify_chain(e, 0, { plain.back() }));
            CHECK_OK(verify_chain(e, 1, { plain.back() })); // both states are the same
            const int32_t best_of_1 = best(pyspec_logits(e, 1, 0), n_vocab(e));
            CHECK_OK(verify_chain(e, 0, { plain.back() }));
            CHECK(best(pyspec_logits(e, 0, 0), n_vocab(e)) == best_of_1);
        }
    }
}

TEST(trees_of_a_coast_fit_into_what_is_left_of_the_context) {
    const std::vector<int32_t> text   = { 11, 12, 3, 11, 12, 4, 11, 12, 5, 11, 12, 6, 11, 12 }; // four ways to go on
    pyspec_engine_params       params = small_params();
    for (const int32_t room : { 1, 2, 3, 9 }) {
        params.n_ctx          = (uint32_t) text.size() - 1 + room;
        EnginePtr  engine     = open(params);
        SamplerPtr s          = sampler(engine.get());
        Coast      coast;
        PilotParts pilot;
        CHECK_OK(pyspec_prefill(engine.get(), 0, text.data(), (int32_t) text.size() - 1));
        CHECK_OK(pyspec_coast(engine.get(), s.get(), 0, text.back(), 1, 5, false, 1000000, &pilot.rules,
                              (int32_t) text.size(), text.data(), &coast.steps));
        CHECK(coast.steps.n_steps == 1 && coast.nodes[0] == std::min(room, 6));
    }
}

TEST(coasts_refuse_nonsense_and_end_at_an_abort) {
    EnginePtr             engine = open();
    pyspec_engine * const e      = engine.get();
    SamplerPtr            s      = sampler(e);
    Coast                 coast;
    PilotParts            pilot;
    const int32_t         token = 9;
    const auto            run   = [&](int32_t steps, int32_t tokens, pyspec_pilot * rules, pyspec_coast_steps * to) {
        return pyspec_coast(e, s.get(), 0, token, steps, tokens, false, 1000000, rules, 1, &token, to);
    };
    CHECK_STATUS(run(0, 1, nullptr, &coast.steps), PYSPEC_ERR_ARGUMENT, "max_steps is 0");
    CHECK_STATUS(run(1, 0, nullptr, &coast.steps), PYSPEC_ERR_ARGUMENT, "max_tokens 0");
    CHECK_STATUS(run(1, 1, nullptr, nullptr), PYSPEC_ERR_ARGUMENT, "steps is NULL");
    Coast empty;
    empty.steps.path = nullptr;
    CHECK_STATUS(run(1, 1, nullptr, &empty.steps), PYSPEC_ERR_ARGUMENT, "NULL");
    pyspec_pilot bad = pilot.rules;
    bad.index        = nullptr;
    CHECK_STATUS(run(1, 1, &bad, &coast.steps), PYSPEC_ERR_ARGUMENT, "ngram is NULL");
    bad             = pilot.rules;
    bad.calibration = nullptr;
    CHECK_STATUS(run(1, 1, &bad, &coast.steps), PYSPEC_ERR_ARGUMENT, "calibration is NULL");
    bad       = pilot.rules;
    bad.sizes = nullptr;
    CHECK_STATUS(run(1, 1, &bad, &coast.steps), PYSPEC_ERR_ARGUMENT, "NULL");
    const std::vector<int32_t> falling = { 2, 4, 3, 6 }, one = { 1, 2, 3, 4 };
    for (const auto & sizes : { falling, one }) {
        bad       = pilot.rules;
        bad.sizes = sizes.data();
        CHECK_STATUS(run(1, 1, &bad, &coast.steps), PYSPEC_ERR_ARGUMENT, "sizes ascend from 2 on");
    }
    bad      = pilot.rules;
    bad.slot = 1 << 16;
    CHECK_STATUS(run(1, 1, &bad, &coast.steps), PYSPEC_ERR_ARGUMENT, "slot is 65536");
    bad       = pilot.rules;
    bad.depth = 65;
    CHECK_STATUS(run(1, 1, &bad, &coast.steps), PYSPEC_ERR_ARGUMENT, "depth 65");
    bad           = pilot.rules;
    bad.recent_ms = 0.0;
    CHECK_STATUS(run(1, 1, &bad, &coast.steps), PYSPEC_ERR_ARGUMENT, "recent_ms is 0");

    double  gain = 0.0;
    int32_t nodes = 0, parent = 0, depth = 1, first = 0, kind = 0;
    double  log_prob = -0.1, value = 0.0;
    bool    gives_way = false;
    CHECK_STATUS(pyspec_pilot_gain(nullptr, 1, &token, &gain, &nodes, &gives_way), PYSPEC_ERR_ARGUMENT, "pilot is NULL");
    CHECK_STATUS(pyspec_pilot_gain(&pilot.rules, 1, nullptr, &gain, &nodes, &gives_way), PYSPEC_ERR_ARGUMENT, "NULL");
    CHECK_STATUS(pyspec_calibration_values(pilot.calibration, -1, 1, &parent, &depth, &log_prob, &first, 0.0, &value, &kind),
                 PYSPEC_ERR_ARGUMENT, "slot -1");
    const std::vector<int32_t> two = { -1, 1 }, depths = { 0, 1 }, firsts = { 0, 0 };
    const std::vector<double>  beliefs = { 0.0, -0.1 };
    CHECK_STATUS(pyspec_calibration_values(pilot.calibration, 0, 2, two.data(), depths.data(), beliefs.data(), firsts.data(),
                                           0.0, &value, &kind), PYSPEC_ERR_TREE, "node 1 has parent 1");
    CHECK_STATUS(pyspec_calibration_observe(pilot.calibration, 0, -1, true), PYSPEC_ERR_ARGUMENT, "class -1");
    CHECK_STATUS(pyspec_calibration_observe(nullptr, 0, 0, true), PYSPEC_ERR_ARGUMENT, "calibration is NULL");
    CHECK(pyspec_calibration_probability(pilot.calibration, 0, -1, 0.0) < 0.0);
    CHECK_STATUS(pyspec_calibration_learn(pilot.calibration, 0, 1, nullptr, nullptr, nullptr, 1, nullptr, nullptr),
                 PYSPEC_ERR_ARGUMENT, "NULL");
    pyspec_calibration_forget(pilot.calibration, 1 << 30);
    pyspec_calibration_close(nullptr);

    pilot.rules.least = 1e9; // gives way at once: no step
    CHECK_OK(run(4, 4, &pilot.rules, &coast.steps));
    CHECK(coast.steps.n_steps == 0 && pyspec_seq_length(e, 0) == 0);
    pyspec_engine_abort(e, true);
    CHECK_STATUS(run(4, 4, nullptr, &coast.steps), PYSPEC_ERR_ABORTED, "abort");
    pyspec_engine_abort(e, false);
    CHECK_OK(run(4, 4, nullptr, &coast.steps));
    CHECK(coast.steps.n_steps == 4);
}

TEST(state_is_saved_copied_and_restored) {
    EnginePtr             engine = open();
    pyspec_engine * const e      = engine.get();
    const int32_t         tokens[] = { 5, 6, 7, 8, 9, 10 };
    CHECK_OK(pyspec_prefill(e, 0, tokens, 6));
    CHECK_OK(verify_chain(e, 0, { 11, 12, 13 }));
    CHECK_OK(commit_chain(e, 0, 2));

    const int64_t size = pyspec_seq_save(e, 0, nullptr, 0);
    CHECK(size > 0);
    std::vector<uint8_t> state(size);
    CHECK(pyspec_seq_save(e, 0, state.data(), state.size() - 1) == PYSPEC_ERR_ARGUMENT);
    CHECK(pyspec_seq_save(e, 0, state.data(), state.size()) == size);

    const auto logits = [&](int32_t seq) {
        CHECK_OK(verify_chain(e, seq, { 12 }));
        const float * row = pyspec_logits(e, seq, 0);
        return std::vector<float>(row, row + n_vocab(e));
    };
    const std::vector<float> expected = logits(0);
    CHECK_OK(pyspec_seq_restore(e, 1, state.data(), state.size()));
    CHECK(logits(1) == expected);
    CHECK_OK(pyspec_seq_reset(e, 1));
    CHECK(pyspec_seq_length(e, 1) == 0);
    CHECK_OK(pyspec_seq_restore(e, 0, state.data(), state.size()));
    CHECK_OK(pyspec_seq_copy(e, 0, 1));
    CHECK(logits(1) == expected);

    for (size_t cut : { (size_t) 0, (size_t) 1, (size_t) 50, state.size() / 2, state.size() - 1 }) {
        CHECK_STATUS(pyspec_seq_restore(e, 1, state.data(), cut), PYSPEC_ERR_ARGUMENT, "state to restore into sequence 1");
    }
    for (size_t at = 0; at < state.size(); at += 1 + state.size() / 97) {
        state[at] ^= 0x10;
        CHECK(pyspec_seq_restore(e, 1, state.data(), state.size()) != PYSPEC_OK);
        state[at] ^= 0x10;
    }
    CHECK(pyspec_seq_length(e, 1) == 8); // a refusal changes nothing
}

TEST(samplers) {
    EnginePtr             engine = open();
    pyspec_engine * const e      = engine.get();
    CHECK_OK(verify_chain(e, 0, { 5, 6 }));

    pyspec_sampler_params params = pyspec_sampler_default_params();
    const int32_t         tokens[] = { 3, 4 };
    const float           values[] = { 1.5f, -INFINITY };
    params.seed              = 7;
    params.temp              = 1.2f;
    params.top_k             = 30;
    params.top_p             = 0.95f;
    params.min_p             = 0.01f;
    params.typical_p         = 0.98f;
    params.penalty_last_n    = -1;
    params.penalty_repeat    = 1.1f;
    params.n_logit_bias      = 2;
    params.logit_bias_tokens = tokens;
    params.logit_bias_values = values;
    params.grammar           = "root ::= [a-z \\n]*";
    SamplerPtr s             = sampler(e, params);
    CHECK_OK(pyspec_sampler_accept_prompt(s.get(), tokens, 2));

    const auto draw = [&](pyspec_sampler * from) {
        int32_t token = -1;
        CHECK_OK(pyspec_sample(e, from, 0, 1, &token));
        return token;
    };
    for (int i = 0; i < 5; ++i) {
        draw(s.get());
    }
    pyspec_sampler * copy = nullptr;
    CHECK_OK(pyspec_sampler_clone(s.get(), &copy));
    SamplerPtr clone(copy);
    for (int i = 0; i < 20; ++i) {
        CHECK(draw(s.get()) == draw(clone.get()));
    }
    pyspec_sampler_reset(s.get());
    draw(s.get());

    engine.reset(); // a sampler may outlive its engine
    pyspec_sampler * again = nullptr;
    CHECK_OK(pyspec_sampler_clone(clone.get(), &again));
    pyspec_sampler_close(again);
}

TEST(tokens_chosen_on_the_graph_are_those_of_the_rows) {
    pyspec_engine_params params = small_params();
    params.graph_argmax         = true;
    EnginePtr             engine = open(params);
    pyspec_engine * const e      = engine.get();
    SamplerPtr            s      = sampler(e);
    CHECK(pyspec_sampler_greedy(s.get()) == (pyspec_sampler_default_params().temp <= 0.0f));
    pyspec_sampler_params greedy = pyspec_sampler_default_params();
    greedy.temp                  = 0.0f;
    s                            = sampler(e, greedy);
    CHECK(pyspec_sampler_greedy(s.get()) && !pyspec_sampler_greedy(nullptr));

    const int32_t     tokens[]  = { 5, 6, 7, 8, 9, 10 };
    const int32_t     parents[] = { -1, 0, 0, 1, 1, 2 };
    const pyspec_tree trees[]   = { { 0, 6, tokens, parents }, { 1, 4, tokens, parents } };
    for (int round = 0; round < 6; ++round) {
        CHECK_OK(pyspec_verify(e, trees, 1 + round % 2, round % 3 > 0));
        for (int32_t seq = 0; seq <= round % 2; ++seq) {
            for (int32_t node = 0; node < trees[seq].n_nodes; ++node) {
                int32_t token = -1;
                CHECK_OK(pyspec_sample(e, s.get(), seq, node, &token));
                CHECK(token == best(pyspec_logits(e, seq, node), n_vocab(e)));
            }
        }
    }
    CHECK_OK(pyspec_commit(e, 0, std::vector<int32_t>{ 0 }.data(), 1)); // and what is drawn next has no tree
    int32_t token = -1;
    CHECK(pyspec_sample(e, s.get(), 0, 0, &token) == PYSPEC_ERR_STATE);
}

TEST(null_and_nonsense_are_refused) {
    EnginePtr             engine = open();
    pyspec_engine * const e      = engine.get();
    SamplerPtr            s      = sampler(e);
    int32_t               token  = 0;
    float                 value  = 0;
    pyspec_info           info;
    pyspec_sampler *      sampler_out = nullptr;
    pyspec_engine *       engine_out  = nullptr;
    pyspec_engine_params  params      = small_params();
    const pyspec_sampler_params sampling = pyspec_sampler_default_params();
    const pyspec_tree     tree{ 0, 1, &token, nullptr };

    CHECK_STATUS(pyspec_engine_open(nullptr, &params, nullptr, nullptr, &engine_out), PYSPEC_ERR_ARGUMENT, "path");
    CHECK_STATUS(pyspec_engine_open(model_path, nullptr, nullptr, nullptr, &engine_out), PYSPEC_ERR_ARGUMENT, "params is NULL");
    CHECK_STATUS(pyspec_engine_open(model_path, &params, nullptr, nullptr, nullptr), PYSPEC_ERR_ARGUMENT, "out is NULL");
    CHECK_STATUS(pyspec_engine_open("/nonexistent.gguf", &params, nullptr, nullptr, &engine_out), PYSPEC_ERR_MODEL, "No such file");
    CHECK_STATUS(pyspec_engine_attach(nullptr, &params, &engine_out), PYSPEC_ERR_ARGUMENT, "llama_model");
    CHECK_STATUS(pyspec_engine_attach(pyspec_engine_model(e), nullptr, &engine_out), PYSPEC_ERR_ARGUMENT, "params is NULL");
    CHECK(engine_out == nullptr);
    pyspec_engine_close(nullptr);
    CHECK_STATUS(pyspec_engine_info(nullptr, &info), PYSPEC_ERR_ARGUMENT, "engine is NULL");
    CHECK_STATUS(pyspec_engine_info(e, nullptr), PYSPEC_ERR_ARGUMENT, "out is NULL");
    CHECK(pyspec_engine_model(nullptr) == nullptr && pyspec_engine_context(nullptr) == nullptr);
    pyspec_engine_abort(nullptr, true);
    pyspec_engine_timings(nullptr, nullptr, true);
    pyspec_engine_timings(e, nullptr, true);

    CHECK(pyspec_tokenize(nullptr, "x", 1, false, false, &token, 1) == INT32_MIN);
    CHECK(pyspec_tokenize(e, nullptr, 1, false, false, &token, 1) == INT32_MIN);
    CHECK(pyspec_tokenize(e, "x", -1, false, false, &token, 1) == INT32_MIN);
    CHECK(pyspec_tokenize(e, "x", 1, false, false, nullptr, 1) == INT32_MIN);
    CHECK(pyspec_tokenize(e, nullptr, 0, false, false, nullptr, 0) == 0);
    CHECK(pyspec_tokenize(e, "x x x x", 7, false, false, &token, 1) < -1);
    CHECK(pyspec_token_to_piece(e, -1, true, nullptr, 0) == INT32_MIN);
    CHECK(pyspec_token_to_piece(e, INT32_MAX, true, nullptr, 0) == INT32_MIN);
    CHECK(pyspec_token_to_piece(e, 5, true, nullptr, 5) == INT32_MIN);
    CHECK(pyspec_token_to_piece(nullptr, 5, true, nullptr, 0) == INT32_MIN);
    CHECK(!pyspec_token_is_eog(e, -1) && !pyspec_token_is_eog(nullptr, 0));
    CHECK(pyspec_chat_template(nullptr) == nullptr);

    CHECK(pyspec_seq_length(nullptr, 0) == PYSPEC_ERR_ARGUMENT);
    CHECK(pyspec_seq_length(e, 2) == PYSPEC_ERR_ARGUMENT);
    CHECK(pyspec_seq_reset(nullptr, 0) == PYSPEC_ERR_ARGUMENT);
    CHECK(pyspec_seq_copy(e, 0, -1) == PYSPEC_ERR_ARGUMENT);
    CHECK(pyspec_seq_save(nullptr, 0, nullptr, 0) == PYSPEC_ERR_ARGUMENT);
    CHECK(pyspec_seq_restore(e, 0, nullptr, 0) == PYSPEC_ERR_ARGUMENT);

    CHECK_STATUS(pyspec_prefill(e, 0, nullptr, 1), PYSPEC_ERR_ARGUMENT, "tokens is NULL");
    CHECK_STATUS(pyspec_prefill(e, 0, &token, -1), PYSPEC_ERR_ARGUMENT, "negative");
    CHECK_OK(pyspec_prefill(e, 0, nullptr, 0));
    CHECK_STATUS(pyspec_verify(e, nullptr, 1, false), PYSPEC_ERR_ARGUMENT, "trees is NULL");
    CHECK_STATUS(pyspec_verify(e, &tree, 0, false), PYSPEC_ERR_ARGUMENT, "verify of 0 trees");
    CHECK_STATUS(pyspec_verify(e, &tree, 1, false), PYSPEC_ERR_ARGUMENT, "parents is NULL");
    CHECK_STATUS(pyspec_commit(e, 0, &token, 1), PYSPEC_ERR_STATE, "no uncommitted tree");
    CHECK(pyspec_logits(e, 0, 0) == nullptr && pyspec_last_status() == PYSPEC_ERR_STATE);
    CHECK(pyspec_hidden(e, 5, 0) == nullptr && pyspec_last_status() == PYSPEC_ERR_ARGUMENT);
    CHECK_OK(verify_chain(e, 0, { 1 }));
    CHECK_STATUS(pyspec_commit(e, 0, nullptr, 1), PYSPEC_ERR_ARGUMENT, "path of sequence 0 is NULL");

    CHECK_STATUS(pyspec_sampler_create(e, nullptr, &sampler_out), PYSPEC_ERR_ARGUMENT, "params is NULL");
    CHECK_STATUS(pyspec_sampler_create(nullptr, &sampling, &sampler_out), PYSPEC_ERR_ARGUMENT, "engine is NULL");
    CHECK_STATUS(pyspec_sampler_create(e, &sampling, nullptr), PYSPEC_ERR_ARGUMENT, "out is NULL");
    CHECK_STATUS(pyspec_sampler_clone(nullptr, &sampler_out), PYSPEC_ERR_ARGUMENT, "sampler is NULL");
    pyspec_sampler_close(nullptr);
    pyspec_sampler_reset(nullptr);
    CHECK_STATUS(pyspec_sampler_accept_prompt(s.get(), nullptr, 3), PYSPEC_ERR_ARGUMENT, "tokens is NULL");
    CHECK_STATUS(pyspec_sample(e, nullptr, 0, 0, &token), PYSPEC_ERR_ARGUMENT, "sampler is NULL");
    CHECK_STATUS(pyspec_sample(e, s.get(), 0, 0, nullptr), PYSPEC_ERR_ARGUMENT, "token is NULL");
    CHECK_STATUS(pyspec_accept(e, s.get(), 0, 1, false, nullptr, &token, &token), PYSPEC_ERR_ARGUMENT, "path is NULL");
    CHECK_STATUS(pyspec_accept(e, s.get(), 0, 0, false, &token, &token, &token), PYSPEC_ERR_ARGUMENT, "max_path is 0");
    const pyspec_mtp_drafts drafts = { 1, 1, 1, 0.0f, &token, &token, &token, &value };
    CHECK_STATUS(pyspec_mtp_draft(e, 1, &token, nullptr, &drafts), PYSPEC_ERR_ARGUMENT, "NULL");
    CHECK_STATUS(pyspec_mtp_draft(e, 1, &token, &token, nullptr), PYSPEC_ERR_ARGUMENT, "drafts is NULL");
    CHECK_STATUS(pyspec_mtp_draft(nullptr, 1, &token, &token, &drafts), PYSPEC_ERR_ARGUMENT, "engine is NULL");
    CHECK_STATUS(pyspec_dflash_open(e, nullptr, nullptr), PYSPEC_ERR_ARGUMENT, "empty");
    CHECK_STATUS(pyspec_dflash_open(e, model_path, nullptr), PYSPEC_ERR_DRAFT, "no DFlash drafter");
    CHECK_STATUS(pyspec_dflash_draft(e, 1, &token, &token, 1, 1, &token, &value, nullptr, nullptr), PYSPEC_ERR_DRAFT,
                 "no DFlash drafter is open");
    CHECK_STATUS(pyspec_draft_head_add(e, 1, &token, &value, 4), PYSPEC_ERR_STATE, "not trimmed");
    CHECK_STATUS(pyspec_top(e, 0, 0, 0, &token, &value), PYSPEC_ERR_ARGUMENT, "top_k is 0");
    CHECK_STATUS(pyspec_engine_set_threads(e, 0), PYSPEC_ERR_ARGUMENT, "0 threads");

    params.type_k = 4; // a type that was removed from ggml
    CHECK_STATUS(pyspec_engine_open(model_path, &params, nullptr, nullptr, &engine_out), PYSPEC_ERR_ARGUMENT, "type_k is 4");
    params              = small_params();
    params.mtp          = true;
    params.draft_type_v = 5; // a type that was removed from ggml
    CHECK_STATUS(pyspec_engine_open(model_path, &params, nullptr, nullptr, &engine_out), PYSPEC_ERR_ARGUMENT, "draft_type_v is 5");
    params        = small_params();
    params.n_seq_max = 0;
    CHECK_STATUS(pyspec_engine_open(model_path, &params, nullptr, nullptr, &engine_out), PYSPEC_ERR_ARGUMENT, "n_seq_max is 0");
    params.n_seq_max = 100000;
    CHECK_STATUS(pyspec_engine_open(model_path, &params, nullptr, nullptr, &engine_out), PYSPEC_ERR_ARGUMENT, "n_seq_max is 100000");
}

TEST(full_contexts_and_widest_trees) {
    pyspec_engine_params params = small_params(3, 64);
    params.n_ctx                = 70;
    params.n_batch              = 1; // grows to what the trees need
    params.n_ubatch             = 1;
    EnginePtr             engine = open(params);
    pyspec_engine * const e      = engine.get();
    std::vector<int32_t>  tokens(64, 7), parents(64);
    std::iota(parents.begin(), parents.end(), -1);
    std::vector<pyspec_tree> trees;
    for (int32_t seq = 2; seq >= 0; --seq) {
        CHECK_OK(pyspec_prefill(e, seq, tokens.data(), 6));
        trees.push_back({ seq, 64 - seq, tokens.data(), parents.data() });
    }
    CHECK_OK(pyspec_verify(e, trees.data(), 3, false));
    for (int32_t seq = 0; seq < 3; ++seq) {
        CHECK(pyspec_logits(e, seq, 63 - seq) != nullptr);
        CHECK_OK(commit_chain(e, seq, seq == 0 ? 64 : 1));
    }
    CHECK_STATUS(verify_chain(e, 0, { 1 }), PYSPEC_ERR_CONTEXT, "sequence 0 holds 70 tokens; 1 more exceed its context of 70");
    CHECK_OK(verify_chain(e, 1, std::vector<int32_t>(63, 3)));
    CHECK_STATUS(verify_chain(e, 1, std::vector<int32_t>(64, 3)), PYSPEC_ERR_CONTEXT, "sequence 1 holds 7 tokens");
}

TEST(abort_from_another_thread) {
    EnginePtr             engine = open();
    pyspec_engine * const e      = engine.get();
    std::vector<int32_t>  tokens(200, 9);
    for (int i = 0; i < 8; ++i) {
        std::thread         stopper([&] { pyspec_engine_abort(e, true); });
        const pyspec_status status = pyspec_prefill(e, 0, tokens.data(), 200);
        stopper.join();
        CHECK(status == PYSPEC_OK || status == PYSPEC_ERR_ABORTED);
        CHECK(pyspec_verify(e, nullptr, 1, false) == PYSPEC_ERR_ARGUMENT);
        CHECK_STATUS(verify_chain(e, 0, { 1 }), PYSPEC_ERR_ABORTED, "abort");
        pyspec_engine_abort(e, false);
        CHECK_OK(verify_chain(e, 0, { 1 }));
        CHECK_OK(pyspec_seq_reset(e, 0));
    }
}

TEST(engines_share_a_model) {
    EnginePtr            first  = open();
    pyspec_engine_params params = small_params(1);
    pyspec_engine *      e      = nullptr;
    CHECK_OK(pyspec_engine_attach(pyspec_engine_model(first.get()), &params, &e));
    EnginePtr second(e);
    first.reset();
    CHECK_OK(verify_chain(e, 0, { 1, 2 }));
    CHECK(pyspec_chat_template(e) == nullptr || *pyspec_chat_template(e) != '\0');
}

TEST(loading_can_be_given_up) {
    const pyspec_engine_params params = small_params();
    pyspec_engine *            e      = nullptr;
    int                        calls  = 0;
    const auto                 stop   = [](float, void * n) { return ++*(int *) n < 2; };
    CHECK_STATUS(pyspec_engine_open(model_path, &params, stop, &calls, &e), PYSPEC_ERR_ABORTED, "given up");
    CHECK(calls == 2 && e == nullptr);
}

TEST(versions) {
    CHECK(pyspec_abi() == PYSPEC_ABI);
    CHECK(strlen(pyspec_version()) > 0);
}

int main(int argc, char ** argv) {
    const char * named = getenv("PYSPEC_TEST_MODEL");
    model_path         = argc > 1 ? argv[1] : named ? named : "pyspec/models/demo.gguf";
    return check::run();
}
