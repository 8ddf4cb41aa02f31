#include "draft_head.h"

#include "error.h"

namespace pyspec {

void DraftHead::init(int32_t n_rows) {
    if (n_rows < 1 || n_rows > n_vocab) {
        fail(PYSPEC_ERR_ARGUMENT, "draft head of %d rows; it must have 1 to the vocabulary's %d", n_rows, n_vocab);
    }
    if (trimmed()) {
        fail(PYSPEC_ERR_STATE, "the draft head is trimmed already");
    }
    switch (llama_output_subset_init(ctx, n_rows)) {
        case 0:
            break;
        case -2:
            fail(PYSPEC_ERR_MEMORY, "no memory for a draft head of %d rows", n_rows);
        default:
            fail(PYSPEC_ERR_DRAFT, "the output matrix of this model cannot be trimmed: its rows share scales or adapters");
    }
    capacity = n_rows;
    present.assign(n_vocab, false);
}

void DraftHead::add(int32_t n, const int32_t * new_tokens, const void * data, size_t size) {
    if (!trimmed()) {
        fail(PYSPEC_ERR_STATE, "the draft head is not trimmed");
    }
    if (n < 1 || !new_tokens || !data) {
        fail(PYSPEC_ERR_ARGUMENT, "tokens for the draft head: %s", n < 1 ? "none" : "a pointer is NULL");
    }
    const int32_t first = (int32_t) tokens.size();
    if (n > capacity - first) {
        fail(PYSPEC_ERR_ARGUMENT, "the draft head has room for %d rows and holds %d; %d more do not fit", capacity, first, n);
    }
    std::vector<bool> after = present;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t token = new_tokens[i];
        if (token < 0 || token >= n_vocab) {
            fail(PYSPEC_ERR_ARGUMENT, "token %d for the draft head; the vocabulary has %d", token, n_vocab);
        }
        if (after[token]) {
            fail(PYSPEC_ERR_ARGUMENT, "token %d is in the draft head already", token);
        }
        after[token] = true;
    }
    if (!llama_output_subset_set(ctx, first, n, data, size)) {
        fail(PYSPEC_ERR_ARGUMENT, "%zu bytes are not %d rows of the output matrix", size, n);
    }
    tokens.insert(tokens.end(), new_tokens, new_tokens + n);
    present = std::move(after);
}

void DraftHead::to_tokens(int32_t * indices, int32_t n) const {
    if (trimmed()) {
        for (int32_t i = 0; i < n; ++i) {
            indices[i] = tokens[indices[i]];
        }
    }
}

} // namespace pyspec
