// The output matrix of a drafting context, whole or trimmed to some tokens.
#pragma once

#include "llama.h"

#include <cstdint>
#include <vector>

namespace pyspec {

class DraftHead {
public:
    void bind(llama_context * context, int32_t vocabulary) {
        ctx     = context;
        n_vocab = vocabulary;
    }

    void init(int32_t n_rows);
    void add(int32_t n, const int32_t * new_tokens, const void * data, size_t size);

    // Logits that count, of a row of the context's outputs.
    int32_t n_logits() const { return trimmed() ? (int32_t) tokens.size() : n_vocab; }
    // Turns indices of logits into tokens.
    void    to_tokens(int32_t * indices, int32_t n) const;

private:
    bool trimmed() const { return capacity > 0; }

    llama_context *      ctx      = nullptr;
    int32_t              n_vocab  = 0;
    int32_t              capacity = 0;
    std::vector<int32_t> tokens; // of every row
    std::vector<bool>    present; // [n_vocab]
};

} // namespace pyspec
