// The request's sampler on rows of logits, beside llama.cpp's chain over the whole vocabulary.
//
//   test_native_sampler [MODEL]     default: PYSPEC_TEST_MODEL, or the demo model
#include "native_check.h"

#include "error.h"
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

using namespace pyspec;

namespace {

const char *           model_path = nullptr;
std::shared_ptr<Model> model;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

// All that a request can ask for without a look back at its text, in llama.cpp's own samplers.
SamplerPtr whole_vocabulary(const pyspec_sampler_params & p) {
    SamplerPtr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    const auto add = [&](bool used, llama_sampler * sampler) {
        SamplerPtr owned(sampler);
        if (used) {
            llama_sampler_chain_add(chain.get(), owned.release());
        }
    };
    add(p.top_k > 0 && p.top_k < model->n_vocab, llama_sampler_init_top_k(p.top_k));
    add(p.typical_p < 1.0f, llama_sampler_init_typical(p.typical_p, 1));
    add(p.top_p < 1.0f, llama_sampler_init_top_p(p.top_p, 1));
    add(p.min_p > 0.0f, llama_sampler_init_min_p(p.min_p, 1));
    add(p.temp != 1.0f, llama_sampler_init_temp(p.temp));
    add(true, llama_sampler_init_dist(p.seed));
    return chain;
}

int32_t draw(llama_sampler * chain, const std::vector<float> & logits) {
    std::vector<llama_token_data> candidates;
    for (size_t i = 0; i < logits.size(); ++i) {
        candidates.push_back({ (llama_token) i, logits[i], 0.0f });
    }
    llama_token_data_array all = { candidates.data(), candidates.size(), -1, false };
    llama_sampler_apply(chain, &all);
    llama_sampler_accept(chain, all.data[all.selected].id);
    return all.data[all.selected].id;
}

pyspec_sampler_params sampled(uint32_t seed, int32_t top_k) {
    pyspec_sampler_params p{};
    p.seed           = seed;
    p.temp           = 1.0f;
    p.top_k          = top_k;
    p.top_p          = 1.0f;
    p.typical_p      = 1.0f;
    p.penalty_repeat = 1.0f;
    return p;
}

// Rows as models make them, and such as no model should.
std::vector<float> row(std::mt19937 & random, const std::string & kind) {
    std::normal_distribution<float> normal(0.0f, 2.0f);
    std::vector<float>              logits(model->n_vocab);
    for (float & logit : logits) {
        logit = normal(random);
        if (kind == "ties") {
            logit = std::round(logit);
        } else if (kind == "few") {
            logit = random() % 100 ? -inf : logit;
        } else if (kind == "halves") {
            logit = random() % 2 ? -inf : logit;
        }
    }
    if (kind == "tie-at-k") { // and no other: the best are ranked, two next to each other are equal
        for (size_t i = 0; i < logits.size(); ++i) {
            logits[i] = (float) (i * 7919 % logits.size()) * 0.01f;
        }
        logits[random() % logits.size()] = logits[random() % logits.size()];
    }
    return logits;
}

pyspec_status status_of(Sampler & sampler, const std::vector<float> & logits) {
    return guard([&] { sampler.draw(logits.data()); });
}

} // namespace

TEST(draws_what_the_chain_over_the_whole_vocabulary_draws) {
    std::mt19937 random(3);
    int          n_different_tokens = 0;
    for (const char * kind : { "normal", "ties", "tie-at-k", "few", "halves" }) {
        for (int32_t top_k : { 1, 2, 5, 40, 100, 300, model->n_vocab / 2, model->n_vocab - 1, model->n_vocab, model->n_vocab + 7 }) {
            for (uint32_t seed = 0; seed < 24; ++seed) {
                pyspec_sampler_params p = sampled(seed, top_k);
                p.temp                  = seed % 3 == 0 ? 1.0f : seed % 3 == 1 ? 0.7f : 1.5f;
                p.top_p                 = seed % 4 == 1 ? 0.9f : 1.0f;
                p.min_p                 = seed % 5 == 2 ? 0.05f : 0.0f;
                p.typical_p             = seed % 7 == 3 ? 0.8f : 1.0f;
                Sampler          sampler(model, p, 256);
                const SamplerPtr chain = whole_vocabulary(p);
                int32_t          last  = -1;
                for (int i = 0; i < 8; ++i) {
                    const std::vector<float> logits   = row(random, kind);
                    const int32_t            expected = draw(chain.get(), logits);
                    const int32_t            got      = sampler.draw(logits.data());
                    check::report(got == expected, "drawn as from the whole vocabulary",
                                  std::string(kind) + " top_k " + std::to_string(top_k) + " seed " + std::to_string(seed),
                                  __FILE__, __LINE__);
                    n_different_tokens += got != last;
                    last = got;
                }
            }
        }
    }
    CHECK(n_different_tokens > 5000); // it did draw
}

TEST(a_clone_draws_on_as_its_original) {
    std::mt19937             random(4);
    const std::vector<float> logits = row(random, "normal");
    Sampler                  sampler(model, sampled(7, 40), 256);
    for (int i = 0; i < 5; ++i) {
        sampler.draw(logits.data());
    }
    Sampler clone(sampler);
    for (int i = 0; i < 20; ++i) {
        CHECK(sampler.draw(logits.data()) == clone.draw(logits.data()));
    }
}

TEST(a_grammar_lets_through_the_best_that_it_allows) {
    std::mt19937          random(8);
    pyspec_sampler_params p = sampled(1, 0);
    p.temp                  = 0.0f;
    p.grammar               = "root ::= [a-z \\n]*";
    Sampler       quick(model, p, 256);
    const int32_t token = 3;
    const float   none  = 0.0f;
    p.n_logit_bias      = 1; // of nothing, so that the whole vocabulary is looked at
    p.logit_bias_tokens = &token;
    p.logit_bias_values = &none;
    Sampler whole(model, p, 256);
    int     n_not_the_best = 0;
    for (int i = 0; i < 60; ++i) {
        const std::vector<float> logits = row(random, i % 2 ? "normal" : "ties");
        const int32_t            drawn  = quick.draw(logits.data());
        CHECK(drawn == whole.draw(logits.data()));
        n_not_the_best += logits[drawn] < *std::max_element(logits.begin(), logits.end());
    }
    CHECK(n_not_the_best > 5 && n_not_the_best < 60);
}

TEST(a_grammar_draws_from_the_best_as_from_all) {
    std::mt19937  random(9);
    const int32_t token = 3;
    const float   none  = 0.0f;
    int           n_letters = 0;
    for (const char * grammar : { "root ::= [a-z \\n]*", "root ::= [^x]*", "root ::= (\"a\" | \" b\")*" }) {
        for (int32_t top_k : { 1, 5, 40, 100 }) {
            for (uint32_t seed = 0; seed < 6; ++seed) {
                pyspec_sampler_params p = sampled(seed, top_k);
                p.grammar               = grammar;
                p.top_p                 = seed % 2 ? 0.95f : 1.0f;
                Sampler quick(model, p, 256);
                p.n_logit_bias      = 1; // of nothing, so that the whole vocabulary is looked at
                p.logit_bias_tokens = &token;
                p.logit_bias_values = &none;
                Sampler whole(model, p, 256);
                for (int i = 0; i < 6; ++i) {
                    std::vector<float> logits = row(random, i % 3 ? "normal" : "tie-at-k");
                    const int32_t      drawn  = quick.draw(logits.data());
                    check::report(drawn == whole.draw(logits.data()), "drawn as from the whole vocabulary",
                                  std::string(grammar) + " top_k " + std::to_string(top_k), __FILE__, __LINE__);
                    n_letters += drawn != token;
                }
            }
        }
    }
    CHECK(n_letters > 300);
}

TEST(rows_without_numbers_are_refused) {
    pyspec_sampler_params greedy = sampled(1, 0);
    greedy.temp                  = 0.0f;
    const int32_t         token  = 3;
    const float           bias   = 1.0f;
    pyspec_sampler_params biased = greedy;
    biased.n_logit_bias          = 1;
    biased.logit_bias_tokens     = &token;
    biased.logit_bias_values     = &bias;
    for (const pyspec_sampler_params & p : { greedy, biased, sampled(1, 40), sampled(1, 0) }) {
        Sampler sampler(model, p, 256);
        CHECK(status_of(sampler, std::vector<float>(model->n_vocab, nan_value)) == PYSPEC_ERR_COMPUTE);
        CHECK_MESSAGE(last_error(), "the logits are not numbers");
        CHECK(status_of(sampler, std::vector<float>(model->n_vocab, -inf)) != PYSPEC_OK);
    }
}

TEST(a_best_token_that_somebody_else_found_is_checked) {
    pyspec_sampler_params p = sampled(1, 0);
    p.temp                  = 0.0f;
    const Sampler sampler(model, p, 256);
    CHECK(sampler.greedy() && !Sampler(model, sampled(1, 40), 256).greedy());
    CHECK(sampler.draw_best(3, 1.5f) == 3);
    for (float logit : { nan_value, inf, -inf }) {
        CHECK(guard([&] { sampler.draw_best(0, logit); }) == PYSPEC_ERR_COMPUTE);
        CHECK_MESSAGE(last_error(), "the logits are not numbers");
    }
}

TEST(greedy_passes_over_nan_with_and_without_bias) {
    std::mt19937          random(5);
    pyspec_sampler_params p = sampled(1, 0);
    p.temp                  = 0.0f;
    const int32_t token     = 3;
    const float   bias      = 0.0f;
    Sampler       plain(model, p, 256);
    p.n_logit_bias      = 1;
    p.logit_bias_tokens = &token;
    p.logit_bias_values = &bias;
    Sampler biased(model, p, 256);
    for (int i = 0; i < 50; ++i) {
        std::vector<float> logits = row(random, i % 2 ? "normal" : "ties");
        for (float & logit : logits) {
            logit = random() % 3 == 0 ? nan_value : logit;
        }
        logits[0] = nan_value;
        CHECK(plain.draw(logits.data()) == biased.draw(logits.data()));
        CHECK(std::isfinite(logits[plain.draw(logits.data())]));
    }
}

TEST(a_few_nan_are_never_drawn_from_the_best) {
    std::mt19937 random(6);
    for (uint32_t seed = 0; seed < 20; ++seed) {
        Sampler            sampler(model, sampled(seed, 40), 256);
        std::vector<float> logits = row(random, "normal");
        for (int i = 0; i < 5; ++i) {
            logits[i] = nan_value; // among the first, where a selection starts
        }
        CHECK(sampler.draw(logits.data()) >= 5);
    }
}

int main(int argc, char ** argv) {
    const char * named = getenv("PYSPEC_TEST_MODEL");
    model_path         = argc > 1 ? argv[1] : named ? named : "pyspec/models/demo.gguf";
    pyspec_engine_params params{};
    params.use_mmap = true;
    model           = Model::load(model_path, params, nullptr, nullptr);
    const int status = check::run();
    model.reset();
    return status;
}
