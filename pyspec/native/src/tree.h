// Rules of draft trees and of paths through them. Knows no model.
#pragma once

#include "pyspec.h"

#include <cstdint>
#include <vector>

namespace pyspec {

// A tree that has been checked. Node 0 is the root.
struct Tree {
    std::vector<int32_t> tokens;
    std::vector<int32_t> parents;
    bool                 chain = true; // every node's parent is the node before it

    int32_t size() const { return (int32_t) tokens.size(); }
};

// Copies a caller's tree; fails with PYSPEC_ERR_TREE or PYSPEC_ERR_ARGUMENT.
Tree checked_tree(const pyspec_tree & tree, int32_t max_nodes, int32_t n_vocab);

// path must lead from the root along parent links.
void check_path(const Tree & tree, int32_t seq, const int32_t * path, int32_t n);

// The child of `node` that carries `token`, or -1. Of several, the first.
int32_t child_with_token(const Tree & tree, int32_t node, int32_t token);

} // namespace pyspec
