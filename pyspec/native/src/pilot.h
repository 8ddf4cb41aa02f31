// Drafts from an n-gram index on its own, in place of a controller, while nobody else need be asked. Values nodes and
// chooses the size of tree as pyspec/controller.py does. Knows no model.
#pragma once

#include "calibration.h"
#include "ngram.h"
#include "pyspec.h"

#include <algorithm>
#include <vector>

namespace pyspec {

class Pilot {
public:
    Pilot(pyspec_pilot & rules, Ngram & ngram, Calibration & calibration); // fails with PYSPEC_ERR_ARGUMENT

    // A tree behind the text of the index, as far as it pays for its columns; the root alone where nothing does.
    struct Tree {
        std::vector<int32_t> tokens, parents, depths;
        std::vector<float>   log_probs;
        std::vector<int32_t> nodes; // of what the index drafted, [node]

        int32_t size() const { return (int32_t) tokens.size(); }
    };
    const Tree & draft(int32_t max_depth, int32_t max_nodes);

    // Tokens that the drafted tree is expected to give beyond the root's and what its columns cost.
    double gain() const { return best_gain; }

    // Whether somebody else should be asked in this step.
    bool gives_way() const;

    // Learns what was drawn behind the nodes of a path in a step, and appends it to the text.
    void accept(const int32_t * path, const int32_t * drawn, int32_t n, double ms);

private:
    void    value(const std::vector<Ngram::Node> & drafted); // fills the arrays
    int32_t choose_size();                                   // fills order and best_gain
    void    take(const std::vector<Ngram::Node> & drafted, int32_t size);

    double rate() const { return std::max(rules.recent_tokens, 1e-3) / rules.recent_ms; } // tokens a millisecond

    pyspec_pilot & rules;
    Ngram &        ngram;
    Calibration &  calibration;
    double         best_gain      = 0.0;
    bool           is_behind_tree = false; // the step before had one
    Tree           tree;

    // Of what the index drafted, [node].
    std::vector<int32_t> tokens, parents, depths, firsts, classes;
    std::vector<double>  log_probs, values;
    std::vector<int32_t> order; // nodes by value, the highest first
};

} // namespace pyspec
