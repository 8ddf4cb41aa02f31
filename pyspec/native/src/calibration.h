// How probable a drafted node is, learned from what the target accepted. Reference: pyspec/reference/calibration.py.
// Knows no model.
#pragma once

#include <cstdint>
#include <vector>

namespace pyspec {

class Calibration {
public:
    static constexpr int32_t n_classes    = 60; // of nodes that the same drafters proposed
    static constexpr int32_t no_class     = -1;
    static constexpr int32_t most_classes = 1 << 20;
    static constexpr int32_t most_slots   = 1 << 16;

    // A tree as it was proposed; arrays of n, node 0 is the root. firsts: of every node, the first class of its drafters.
    struct Nodes {
        int32_t         n;
        const int32_t * parents;
        const int32_t * depths;
        const double *  log_probs; // given the parent
        const int32_t * firsts;
    };

    // Probability of acceptance of every node, and its class. Behind a node less probable than floor, nodes are worth 0
    // and have no class.
    void values(int32_t slot, const Nodes & nodes, double floor, double * values, int32_t * classes);

    double probability(int32_t slot, int32_t kind, double log_prob) const;
    void   observe(int32_t slot, int32_t kind, bool hit);
    void   forget(int32_t slot);

    // Counts the children of every node of a path: one of them was drawn behind it, or none.
    void learn(int32_t slot, int32_t n, const int32_t * tokens, const int32_t * parents, const int32_t * classes,
               int32_t n_path, const int32_t * path, const int32_t * drawn);

private:
    struct Cell {
        double hits   = 0.0; // fading
        double trials = 0.0; // 0: nothing is known
    };
    using Cells = std::vector<Cell>; // [class]

    Cells                all;
    std::vector<Cells>   own; // [slot]
    std::vector<int32_t> best; // [node] its most probable child, or -1
};

} // namespace pyspec
