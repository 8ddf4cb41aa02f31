#include "sampler.h"

#include "error.h"
#include "log.h"

#include "llama-grammar.h" // private: its parser throws, the public entry prints to stderr

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

namespace pyspec {

namespace {

constexpr int32_t most_selected = 512; // for more, llama.cpp, which sorts by buckets, is faster than a heap

void check_params(const pyspec_sampler_params & p, const Model & model) {
    const struct {
        const char * name;
        float        value;
    } finite[] = {
        { "temp", p.temp },           { "top_p", p.top_p },
        { "min_p", p.min_p },         { "typical_p", p.typical_p },
        { "penalty_freq", p.penalty_freq }, { "penalty_present", p.penalty_present },
        { "penalty_repeat", p.penalty_repeat },
    };
    for (const auto & parameter : finite) {
        if (!std::isfinite(parameter.value)) {
            fail(PYSPEC_ERR_ARGUMENT, "%s is not a finite number", parameter.name);
        }
    }
    if (p.penalty_repeat <= 0.0f || !std::isfinite(1.0f / p.penalty_repeat)) {
        fail(PYSPEC_ERR_ARGUMENT, "penalty_repeat is %g; it must be above 0", p.penalty_repeat);
    }
    if (p.penalty_last_n < -1) {
        fail(PYSPEC_ERR_ARGUMENT, "penalty_last_n is %d; it must be -1 or more", p.penalty_last_n);
    }
    if (p.n_logit_bias < 0 || (p.n_logit_bias > 0 && (!p.logit_bias_tokens || !p.logit_bias_values))) {
        fail(PYSPEC_ERR_ARGUMENT, "logit_bias: %s", p.n_logit_bias < 0 ? "a negative number of entries" : "an array is NULL");
    }
    for (int32_t i = 0; i < p.n_logit_bias; ++i) {
        model.check_token(p.logit_bias_tokens[i], "logit_bias entry");
        const float bias = p.logit_bias_values[i];
        if (std::isnan(bias) || bias == INFINITY) {
            fail(PYSPEC_ERR_ARGUMENT, "logit_bias of token %d is %g", p.logit_bias_tokens[i], bias);
        }
    }
}

SamplerPtr new_chain() {
    llama_sampler_chain_params params = llama_sampler_chain_default_params();
    params.no_perf                    = true;
    return SamplerPtr(llama_sampler_chain_init(params));
}

void add(SamplerPtr & chain, llama_sampler * sampler) {
    if (!chain) {
        chain = new_chain();
    }
    llama_sampler_chain_add(chain.get(), sampler);
}

// llama_grammar_parser::parse without its printing.
void check_grammar(const char * text, const llama_vocab * vocab) {
    llama_grammar_parser parser(vocab);
    try {
        const char * at = text;
        while (*(at += strspn(at, " \t\r\n"))) {
            if (*at == '#') {
                at += strcspn(at, "\r\n");
                continue;
            }
            at = parser.parse_rule(at);
        }
        for (const auto & [symbol, id] : parser.symbol_ids) {
            if (id >= parser.rules.size() || parser.rules[id].empty()) {
                throw std::runtime_error("rule '" + symbol + "' is not defined");
            }
        }
    } catch (const std::exception & error) {
        std::string message = error.what();
        message             = message.substr(0, message.find('\n'));
        constexpr size_t most = 160;
        fail(PYSPEC_ERR_SAMPLER, "grammar does not parse: %s%s", message.substr(0, most).c_str(),
             message.size() > most ? "..." : "");
    }
    if (parser.symbol_ids.find("root") == parser.symbol_ids.end()) {
        fail(PYSPEC_ERR_SAMPLER, "grammar has no rule 'root'");
    }
}

SamplerPtr new_grammar(const char * text, const llama_vocab * vocab) {
    check_grammar(text, vocab);
    LogScope   log;
    SamplerPtr grammar(llama_sampler_init_grammar(vocab, text, "root"));
    if (!grammar) {
        fail(PYSPEC_ERR_SAMPLER, "grammar is refused: %s", log.cause("llama.cpp gives no reason").c_str());
    }
    return grammar;
}

SamplerPtr clone(const SamplerPtr & sampler) {
    return SamplerPtr(sampler ? llama_sampler_clone(sampler.get()) : nullptr);
}

} // namespace

Sampler::Sampler(std::shared_ptr<Model> the_model, const pyspec_sampler_params & p, int32_t n_ctx)
    : model(std::move(the_model)) {
    check_params(p, *model);
    const llama_vocab * vocab = model->vocab();

    std::vector<llama_logit_bias> bias;
    for (int32_t i = 0; i < p.n_logit_bias; ++i) {
        bias.push_back({ p.logit_bias_tokens[i], p.logit_bias_values[i] });
    }
    int32_t             n_suppressed = 0;
    const llama_token * suppressed   = llama_vocab_get_suppress_tokens(vocab, &n_suppressed);
    for (int32_t i = 0; i < n_suppressed; ++i) {
        bias.push_back({ suppressed[i], -INFINITY });
    }
    if (!bias.empty()) {
        add(adjust, llama_sampler_init_logit_bias(model->n_vocab, (int32_t) bias.size(), bias.data()));
    }
    const int32_t last_n = p.penalty_last_n < 0 ? n_ctx : p.penalty_last_n;
    if (last_n > 0 && (p.penalty_repeat != 1.0f || p.penalty_freq != 0.0f || p.penalty_present != 0.0f)) {
        add(adjust, llama_sampler_init_penalties(model->n_vocab, last_n, p.penalty_repeat, p.penalty_freq,
                                                 p.penalty_present));
    }
    if (p.grammar && *p.grammar) {
        grammar = new_grammar(p.grammar, vocab);
    }
    if (p.temp <= 0.0f) {
        return; // greedy: nothing that truncates may remove the best token
    }
    if (p.top_k > 0 && p.top_k < model->n_vocab) {
        top_k = p.top_k;
        add(select, llama_sampler_init_top_k(top_k));
    }
    if (p.typical_p < 1.0f) {
        add(select, llama_sampler_init_typical(p.typical_p, 1));
    }
    if (p.top_p < 1.0f) {
        add(select, llama_sampler_init_top_p(p.top_p, 1));
    }
    if (p.min_p > 0.0f) {
        add(select, llama_sampler_init_min_p(p.min_p, 1));
    }
    if (p.temp != 1.0f) {
        add(select, llama_sampler_init_temp(p.temp));
    }
    // llama.cpp's "choose one for me" is settled here, so that reset and clone keep it.
    add(select, llama_sampler_init_dist(p.seed == LLAMA_DEFAULT_SEED ? std::random_device()() >> 1 : p.seed));
}

Sampler::Sampler(const Sampler & other)
    : model(other.model),
      adjust(clone(other.adjust)),
      grammar(clone(other.grammar)),
      select(clone(other.select)),
      top_k(other.top_k) {}

int32_t Sampler::draw(const float * logits) {
    const int32_t token = pick(logits);
    for (const SamplerPtr * part : { &grammar, &adjust, &select }) {
        if (*part) {
            llama_sampler_accept(part->get(), token);
        }
    }
    return token;
}

int32_t Sampler::draw_best(int32_t token, float logit) const {
    if (!std::isfinite(logit)) {
        fail(PYSPEC_ERR_COMPUTE, "the logits are not numbers");
    }
    return token;
}

void Sampler::accept_prompt(const int32_t * tokens, int32_t n) {
    if (n < 0 || (n > 0 && !tokens)) {
        fail(PYSPEC_ERR_ARGUMENT, "prompt of the sampler: %s", n < 0 ? "a negative number of tokens" : "tokens is NULL");
    }
    for (int32_t i = 0; i < n; ++i) {
        model->check_token(tokens[i], "prompt of the sampler");
    }
    for (int32_t i = 0; i < n && adjust; ++i) {
        llama_sampler_accept(adjust.get(), tokens[i]);
    }
}

void Sampler::reset() {
    for (const SamplerPtr * part : { &grammar, &adjust, &select }) {
        if (*part) {
            llama_sampler_reset(part->get());
        }
    }
}

int32_t Sampler::pick(const float * logits) {
    const int32_t n = model->n_vocab;
    if (!adjust && !select) {
        const int32_t token = argmax(logits, n);
        if (!grammar || grammar_allows({ token, logits[token], 0.0f })) {
            return draw_best(token, logits[token]);
        }
    }
    if (top_k > 0 && !adjust && take_best(logits)) {
        return pick_selected();
    }
    candidates.resize(n);
    for (int32_t i = 0; i < n; ++i) {
        candidates[i] = { i, logits[i], 0.0f };
    }
    current = { candidates.data(), candidates.size(), -1, false };
    if (adjust) {
        llama_sampler_apply(adjust.get(), &current);
    }
    return select ? pick_sampled() : pick_greedy();
}

// The best alone become candidates, in a fraction of the time that a copy of the whole row takes: top_k of them, or as
// many as constrain_best() looks at. False where a grammar lets too few of them through, and where equal logits (or NaN)
// leave open which they are: what llama.cpp makes of these depends on the whole row.
bool Sampler::take_best(const float * logits) {
    const int32_t n = grammar ? n_constrained() : top_k;
    if (n > most_selected || n >= model->n_vocab) {
        return false;
    }
    const int32_t * ids = selection.select(logits, model->n_vocab, n + 1);
    for (int32_t i = 0; i < n; ++i) {
        if (!(logits[ids[i]] > logits[ids[i + 1]])) {
            return false;
        }
    }
    candidates.resize(n);
    for (int32_t i = 0; i < n; ++i) {
        candidates[i] = { ids[i], logits[ids[i]], 0.0f };
    }
    current = { candidates.data(), candidates.size(), -1, /*sorted*/ !grammar };
    return !grammar || constrain(candidates) >= top_k;
}

int32_t Sampler::pick_greedy() {
    const auto best = [this] {
        size_t most = 0;
        while (std::isnan(current.data[most].logit) && most + 1 < current.size) {
            ++most;
        }
        for (size_t i = most + 1; i < current.size; ++i) {
            most = current.data[i].logit > current.data[most].logit ? i : most;
        }
        return current.data[most];
    };
    llama_token_data choice = best();
    if (grammar && !grammar_allows(choice)) { // the best of all, when allowed, is the best of the allowed
        constrain_all();
        choice = best();
    }
    if (!std::isfinite(choice.logit)) {
        refuse();
    }
    return choice.id;
}

int32_t Sampler::pick_sampled() {
    if (grammar && !constrain_best()) {
        constrain_all();
    }
    return pick_selected();
}

int32_t Sampler::pick_selected() {
    bool any = false;
    for (size_t i = 0; i < current.size && !any; ++i) {
        any = std::isfinite(current.data[i].logit);
    }
    if (!any) {
        refuse();
    }
    llama_sampler_apply(select.get(), &current);
    if (current.selected < 0 || (size_t) current.selected >= current.size ||
        !std::isfinite(current.data[current.selected].logit)) {
        refuse();
    }
    return current.data[current.selected].id;
}

bool Sampler::grammar_allows(llama_token_data candidate) const {
    llama_token_data_array one = { &candidate, 1, -1, false };
    llama_sampler_apply(grammar.get(), &one);
    return candidate.logit != -INFINITY;
}

void Sampler::constrain_all() {
    llama_sampler_apply(grammar.get(), &current);
}

// How many of the best tokens are worth a look when a grammar must let top_k through.
int32_t Sampler::n_constrained() const {
    return (int32_t) std::min<int64_t>(top_k * (int64_t) 4 + 64, INT32_MAX);
}

// The number of candidates that the grammar lets through; the others have -INFINITY then.
int32_t Sampler::constrain(std::vector<llama_token_data> & best) const {
    llama_token_data_array array = { best.data(), best.size(), -1, false };
    llama_sampler_apply(grammar.get(), &array);
    return (int32_t) std::count_if(best.begin(), best.end(), [](const llama_token_data & c) { return c.logit != -INFINITY; });
}

// With top_k, only the k best allowed tokens matter: look for them among the best, which a grammar checks in a
// fraction of the time that the whole vocabulary takes. False, and nothing changed, when they are not all there.
bool Sampler::constrain_best() {
    const size_t enough = (size_t) n_constrained();
    if (top_k == 0 || enough >= current.size) {
        return false;
    }
    const auto better = [](const llama_token_data & a, const llama_token_data & b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    };
    std::nth_element(current.data, current.data + enough, current.data + current.size, better);
    std::vector<llama_token_data> best(current.data, current.data + enough);
    if (constrain(best) < top_k) {
        return false;
    }
    std::copy(best.begin(), best.end(), current.data);
    current.size = enough;
    return true;
}

void Sampler::refuse() const {
    const llama_token_data * data = current.data;
    const bool broken = std::any_of(data, data + current.size, [](const llama_token_data & c) { return std::isnan(c.logit); });
    if (broken) {
        fail(PYSPEC_ERR_COMPUTE, "the logits are not numbers");
    }
    fail(PYSPEC_ERR_SAMPLER, "the sampler rejects every token%s", grammar ? " (grammar or logit bias)" : "");
}

} // namespace pyspec
