#include "pilot.h"

#include "error.h"

#include "ggml.h"

#include <algorithm>
#include <numeric>

namespace pyspec {

namespace {

constexpr double after_step = 0.1; // how far after_ms follows a measurement

} // namespace

Pilot::Pilot(pyspec_pilot & the_rules, Ngram & the_ngram, Calibration & the_calibration)
    : rules(the_rules), ngram(the_ngram), calibration(the_calibration) {
    if ((rules.n_sizes > 0 && (!rules.sizes || !rules.costs_ms)) ||
        (rules.n_others > 0 && (!rules.other_tokens || !rules.other_ms))) {
        fail(PYSPEC_ERR_ARGUMENT, "pilot: a pointer is NULL");
    }
    for (int32_t k = 0; k < rules.n_sizes; ++k) {
        if (rules.sizes[k] <= (k > 0 ? rules.sizes[k - 1] : 1)) {
            fail(PYSPEC_ERR_ARGUMENT, "pilot: size %d is %d; sizes ascend from 2 on", k, rules.sizes[k]);
        }
    }
    if (!(rules.recent_ms > 0.0 && rules.fade >= 0.0 && rules.fade < 1.0)) {
        fail(PYSPEC_ERR_ARGUMENT, "pilot: recent_ms is %g and fade %g", rules.recent_ms, rules.fade);
    }
    if (rules.n_sizes < 0 || rules.n_others < 0 || rules.slot < 0 ||
        rules.slot >= Calibration::most_slots || rules.first_class < 0 ||
        rules.first_class > Calibration::most_classes - Calibration::n_classes || rules.depth < 0 ||
        rules.depth > GGML_TREE_MAX_NODES || rules.max_nodes < 1 || rules.max_nodes > GGML_TREE_MAX_NODES) {
        fail(PYSPEC_ERR_ARGUMENT, "pilot: slot is %d, first_class %d, depth %d, max_nodes %d, n_sizes %d", rules.slot,
             rules.first_class, rules.depth, rules.max_nodes, rules.n_sizes);
    }
}

const Pilot::Tree & Pilot::draft(int32_t max_depth, int32_t max_nodes) {
    const auto & drafted = ngram.draft(std::min(rules.depth, max_depth), std::min(rules.max_nodes, max_nodes));
    value(drafted);
    take(drafted, choose_size());
    return tree;
}

void Pilot::value(const std::vector<Ngram::Node> & drafted) {
    const size_t n = drafted.size();
    for (auto * array : { &tokens, &parents, &depths, &firsts, &classes }) {
        array->resize(n);
    }
    log_probs.resize(n);
    values.resize(n);
    for (size_t i = 0; i < n; ++i) {
        tokens[i]    = drafted[i].token;
        parents[i]   = drafted[i].parent;
        depths[i]    = drafted[i].depth;
        firsts[i]    = rules.first_class;
        log_probs[i] = (float) drafted[i].log_prob; // as other drafters give it
    }
    const Calibration::Nodes nodes = { (int32_t) n, parents.data(), depths.data(), log_probs.data(), firsts.data() };
    calibration.values(rules.slot, nodes, rate() * rules.column_ms, values.data(), classes.data());
}

int32_t Pilot::choose_size() {
    best_gain = 0.0;
    order.resize(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [this](int32_t a, int32_t b) { return values[a] > values[b]; });
    if (order.size() < 2 || values[order[1]] < rate() * rules.column_ms) {
        return 1;
    }
    int32_t best    = 1;
    int32_t counted = 1;
    double  gained  = 0.0;
    for (int32_t k = 0; k < rules.n_sizes && rules.sizes[k] <= (int32_t) order.size(); ++k) {
        double more = 0.0;
        for (; counted < rules.sizes[k]; ++counted) {
            more += values[order[counted]];
        }
        if (more == 0.0) {
            break;
        }
        gained += more;
        const double gain = gained - rate() * (rules.costs_ms[k] + rules.after_ms);
        if (gain > best_gain) {
            best_gain = gain;
            best      = rules.sizes[k];
        }
    }
    return best;
}

// No child is worth more than its parent, and of equal ones the parent comes first: parents stay.
void Pilot::take(const std::vector<Ngram::Node> & drafted, int32_t size) {
    tree.nodes.assign(order.begin(), order.begin() + size);
    std::sort(tree.nodes.begin(), tree.nodes.end());
    tree.tokens.clear();
    tree.parents.clear();
    tree.depths.clear();
    tree.log_probs.clear();
    for (int32_t node : tree.nodes) {
        const auto at = std::lower_bound(tree.nodes.begin(), tree.nodes.end(), parents[node]) - tree.nodes.begin();
        tree.tokens.push_back(drafted[node].token);
        tree.parents.push_back(node == 0 ? -1 : (int32_t) at);
        tree.depths.push_back(drafted[node].depth);
        tree.log_probs.push_back((float) drafted[node].log_prob);
    }
}

bool Pilot::gives_way() const {
    const double worth = 1.0 + best_gain - rate() * rules.root_ms;
    for (int32_t i = 0; i < rules.n_others; ++i) {
        if (rules.other_tokens[i] - rate() * rules.other_ms[i] > worth + rules.margin) {
            return true;
        }
    }
    return best_gain < rules.least;
}

void Pilot::accept(const int32_t * path, const int32_t * drawn, int32_t n, double ms) {
    rules.recent_tokens = rules.fade * rules.recent_tokens + n;
    rules.recent_ms     = rules.fade * rules.recent_ms + ms;
    if (tree.size() == 1 && is_behind_tree) { // what a large pass has driven out of the caches must come back
        const double longer = std::clamp(ms - rules.root_ms, 0.0, 0.5 * rules.root_ms);
        rules.after_ms += after_step * (longer - rules.after_ms);
    }
    is_behind_tree = tree.size() > 1;
    if (classes.size() > 1) {
        std::vector<int32_t> walked(n);
        for (int32_t i = 0; i < n; ++i) {
            walked[i] = tree.nodes[path[i]];
        }
        calibration.learn(rules.slot, (int32_t) classes.size(), tokens.data(), parents.data(), classes.data(), n,
                          walked.data(), drawn);
    }
    ngram.append(drawn, n);
}

} // namespace pyspec
