// The request's sampler: draws one token at a time from rows of logits, with a state that can be cloned.
#pragma once

#include "model.h"
#include "topk.h"

#include "llama.h"

#include <memory>
#include <vector>

namespace pyspec {

struct SamplerDeleter {
    void operator()(llama_sampler * s) const { llama_sampler_free(s); }
};
using SamplerPtr = std::unique_ptr<llama_sampler, SamplerDeleter>;

class Sampler {
public:
    Sampler(std::shared_ptr<Model> model, const pyspec_sampler_params & params, int32_t n_ctx);
    Sampler(const Sampler & other);
    Sampler & operator=(const Sampler &) = delete;

    // Draws the next token and takes it into the state. `logits` has n_vocab elements.
    int32_t draw(const float * logits);
    // Draws the token of the greatest logit, which somebody else found. Only of a greedy sampler, which has no state.
    int32_t draw_best(int32_t token, float logit) const;
    bool    greedy() const { return !adjust && !grammar && !select; }
    void    accept_prompt(const int32_t * tokens, int32_t n);
    void    reset();

private:
    int32_t pick(const float * logits);
    bool    take_best(const float * logits);
    int32_t pick_greedy();
    int32_t pick_sampled();
    int32_t pick_selected();
    bool    grammar_allows(llama_token_data candidate) const;
    int32_t n_constrained() const;
    int32_t constrain(std::vector<llama_token_data> & best) const;
    void    constrain_all();
    bool    constrain_best();
    [[noreturn]] void refuse() const;

    // Logit bias and penalties; then the grammar; then truncation, temperature and the draw. llama.cpp's common
    // sampler applies the grammar first: the same, since a rejected token stays rejected under bias and penalties.
    std::shared_ptr<Model> model;
    SamplerPtr             adjust;  // NULL: none
    SamplerPtr             grammar; // NULL: none
    SamplerPtr             select;  // NULL: greedy
    int32_t                top_k = 0;

    std::vector<llama_token_data> candidates; // kept between draws
    llama_token_data_array        current{};
    TopK                          selection;
};

} // namespace pyspec
