// How the target verifies a tree and forgets the nodes that were not accepted. The only place that knows.
//
// The patched llama.cpp takes tree batches and keeps one path of them (llama_tree_init, llama_memory_seq_accept).
// Where a model or a backend cannot do that, an attention-only model still verifies chains, which are cut off by
// position, and a model with recurrent layers verifies the root alone: plain decoding.
#pragma once

#include "model.h"
#include "tree.h"

#include "llama.h"

#include <cstdint>
#include <string>

namespace pyspec {

class Rollback {
public:
    Rollback(const Model & model, uint32_t max_nodes) : model(model), max_nodes(max_nodes) {}

    // Once, after the target context is made.
    void bind(llama_context * ctx, uint32_t n_seq_max);

    bool     trees() const { return why_not.empty(); }
    bool     chains() const { return trees() || model.n_layer_recurrent == 0; }
    uint64_t bytes() const { return tape_bytes; } // what rollback adds to the memory of one sequence

    // Refuses, with PYSPEC_ERR_TREE, what cannot be verified here.
    void check(const Tree & tree, int32_t seq) const;

    // Appends the nodes to a batch, all with outputs; node i becomes batch index (result + i). Where trees are
    // verified, leaves without outputs fill it up to `width` nodes: trees of one size share a pass.
    int32_t add(llama_batch_ext * batch, const Tree & tree, int32_t seq, int32_t length, int32_t width) const;

    // The memory holds `length` committed tokens and the tree's nodes. Keeps the path; false: the memory could
    // not follow and must be rebuilt.
    bool commit(const Tree & tree, int32_t seq, int32_t length, const int32_t * path, int32_t n) const;

    // Forgets the whole tree; false as above.
    bool drop(int32_t seq, int32_t length) const;

private:
    const Model &   model;
    const uint32_t  max_nodes;
    llama_context * ctx = nullptr;
    std::string     why_not;
    uint64_t        tape_bytes = 0;
};

} // namespace pyspec
