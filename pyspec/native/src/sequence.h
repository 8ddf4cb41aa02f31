// What the engine knows about one sequence besides llama.cpp's memory.
#pragma once

#include "tree.h"

#include <cstdint>
#include <vector>

namespace pyspec {

// Beyond this many, committed tokens are fed to a drafter without waiting for its next draft.
constexpr uint32_t many_unseen = 256;

struct Sequence {
    std::vector<int32_t> tokens;        // the target's memory holds exactly these, unless it is stale
    bool                 stale = false; // the target's memory is empty and must be rebuilt from `tokens`

    // The uncommitted tree; no nodes: none.
    Tree                 tree;
    std::vector<float>   tree_hidden;   // [nodes][n_embd], only with MTP
    uint64_t             tree_pass = 0; // the engine's pass that made its outputs
    int32_t              tree_index = 0; // batch index of the root in that pass

    // MTP reads, at position p, the token p and the target's hidden state of p - 1. Its cache holds positions
    // 1 .. mtp_fed - 1; `hidden` holds the rows from mtp_fed - 1 on, so row p - mtp_fed belongs to token p and
    // the last row, of the last committed token, to the next root.
    int32_t              mtp_fed = 1;
    std::vector<float>   hidden;

    // A DFlash drafter reads the target's features of every token that it hears. It has done with the first
    // dflash_fed tokens, and `features` holds the rows of the rest. dflash_unheard of them passed while it did not
    // listen: in its cache the text closes up over them.
    int32_t              dflash_fed     = 0;
    int32_t              dflash_unheard = 0;
    std::vector<float>   features;
    std::vector<float>   tree_features; // [nodes][floats of a token's features]; empty: it did not listen

    int32_t length() const { return (int32_t) tokens.size(); }
    void    clear_tree() { tree = Tree(); }
};

} // namespace pyspec
