#include "tree.h"

#include "error.h"

namespace pyspec {

Tree checked_tree(const pyspec_tree & tree, int32_t max_nodes, int32_t n_vocab) {
    if (tree.n_nodes < 1) {
        fail(PYSPEC_ERR_TREE, "tree of sequence %d has %d nodes; at least the root is needed", tree.seq, tree.n_nodes);
    }
    if (tree.n_nodes > max_nodes) {
        fail(PYSPEC_ERR_TREE, "tree of sequence %d has %d nodes; the engine was opened for %d", tree.seq, tree.n_nodes,
             max_nodes);
    }
    if (!tree.tokens || !tree.parents) {
        fail(PYSPEC_ERR_ARGUMENT, "tree of sequence %d: %s is NULL", tree.seq, tree.tokens ? "parents" : "tokens");
    }
    if (tree.parents[0] != -1) {
        fail(PYSPEC_ERR_TREE, "tree of sequence %d: the root has parent %d; it must be -1", tree.seq, tree.parents[0]);
    }
    Tree copy;
    for (int32_t i = 0; i < tree.n_nodes; ++i) {
        const int32_t parent = tree.parents[i];
        if (i > 0 && (parent < 0 || parent >= i)) {
            fail(PYSPEC_ERR_TREE, "tree of sequence %d: node %d has parent %d; a parent must come before its child",
                 tree.seq, i, parent);
        }
        if (tree.tokens[i] < 0 || tree.tokens[i] >= n_vocab) {
            fail(PYSPEC_ERR_TREE, "tree of sequence %d: node %d has token %d; the vocabulary has %d", tree.seq, i,
                 tree.tokens[i], n_vocab);
        }
        copy.chain = copy.chain && parent == i - 1;
    }
    copy.tokens.assign(tree.tokens, tree.tokens + tree.n_nodes);
    copy.parents.assign(tree.parents, tree.parents + tree.n_nodes);
    return copy;
}

void check_path(const Tree & tree, int32_t seq, const int32_t * path, int32_t n) {
    if (n < 1 || n > tree.size()) {
        fail(PYSPEC_ERR_ARGUMENT, "path of sequence %d has %d nodes; its tree has %d and a path starts at the root", seq,
             n, tree.size());
    }
    if (!path) {
        fail(PYSPEC_ERR_ARGUMENT, "path of sequence %d is NULL", seq);
    }
    if (path[0] != 0) {
        fail(PYSPEC_ERR_ARGUMENT, "path of sequence %d starts at node %d; it must start at the root, 0", seq, path[0]);
    }
    for (int32_t i = 1; i < n; ++i) {
        if (path[i] < 0 || path[i] >= tree.size()) {
            fail(PYSPEC_ERR_ARGUMENT, "path of sequence %d: node %d is not in its tree of %d nodes", seq, path[i],
                 tree.size());
        }
        if (tree.parents[path[i]] != path[i - 1]) {
            fail(PYSPEC_ERR_ARGUMENT, "path of sequence %d: node %d is no child of node %d", seq, path[i], path[i - 1]);
        }
    }
}

int32_t child_with_token(const Tree & tree, int32_t node, int32_t token) {
    for (int32_t i = node + 1; i < tree.size(); ++i) {
        if (tree.parents[i] == node && tree.tokens[i] == token) {
            return i;
        }
    }
    return -1;
}

} // namespace pyspec
