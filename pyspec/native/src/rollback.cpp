#include "rollback.h"

#include "error.h"
#include "log.h"

#include <algorithm>

namespace pyspec {

void Rollback::bind(llama_context * target_ctx, uint32_t n_seq_max) {
    ctx = target_ctx;
    LogScope log;
    switch (llama_tree_init(ctx, max_nodes, GGML_GDN_TREE_ROW)) {
        case 0:
            tape_bytes = llama_tree_tape_size(ctx) / n_seq_max;
            break;
        case -1:
            why_not = "llama.cpp verifies no trees for the architecture " + model.arch;
            break;
        case -2:
            why_not = "the backend of its recurrent layers verifies no trees: " + log.cause("no reason logged");
            break;
        default:
            fail(PYSPEC_ERR_MEMORY, "no memory for the tapes of %u nodes for %u sequences", max_nodes, n_seq_max);
    }
}

void Rollback::check(const Tree & tree, int32_t seq) const {
    if (trees() || tree.size() == 1 || (chains() && tree.chain)) {
        return;
    }
    fail(PYSPEC_ERR_TREE, "tree of sequence %d has %d nodes; only %s can be verified, because %s", seq, tree.size(),
         chains() ? "chains" : "the root", why_not.c_str());
}

int32_t Rollback::add(llama_batch_ext * batch, const Tree & tree, int32_t seq, int32_t length, int32_t width) const {
    const int32_t          n = trees() ? std::max(width, tree.size()) : tree.size();
    std::vector<llama_pos> position(n);
    int32_t                first = -1;
    for (int32_t i = 0; i < n; ++i) {
        const bool    filler = i >= tree.size(); // one more child of the root, never looked at
        const int32_t parent = filler ? 0 : tree.parents[i];
        const int32_t index  = llama_batch_ext_add_token(batch, seq, tree.tokens[filler ? 0 : i]);
        position[i]          = parent < 0 ? length : position[parent] + 1;
        first                = i == 0 ? index : first;
        if (index < 0 || !llama_batch_ext_set_pos(batch, index, &position[i]) ||
            !llama_batch_ext_set_output_logits(batch, index, !filler) ||
            (trees() && !llama_batch_ext_set_parent(batch, index, parent < 0 ? -1 : first + parent))) {
            fail(PYSPEC_ERR_COMPUTE, "node %d of sequence %d does not fit the batch", i, seq);
        }
    }
    return first;
}

bool Rollback::commit(const Tree & tree, int32_t seq, int32_t length, const int32_t * path, int32_t n) const {
    llama_memory_t memory = llama_get_memory(ctx);
    if (trees()) {
        return llama_memory_seq_accept(memory, seq, path, n);
    }
    return n == tree.size() || llama_memory_seq_rm(memory, seq, length + n, -1);
}

bool Rollback::drop(int32_t seq, int32_t length) const {
    // The root is in a recurrent state that has no tape.
    if (!trees() && model.n_layer_recurrent > 0) {
        return false;
    }
    llama_memory_t memory = llama_get_memory(ctx);
    return llama_memory_seq_rm(memory, seq, length, -1) && llama_memory_seq_pos_max(memory, seq) == length - 1;
}

} // namespace pyspec
