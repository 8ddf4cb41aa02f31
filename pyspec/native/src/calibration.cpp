#include "calibration.h"

#include "error.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace pyspec {

namespace {

constexpr int32_t               depths = 4; // 1, 2, 3, and deeper
constexpr int32_t               ranks  = 2; // the most probable child, and the others
constexpr std::array<double, 5> edges  = { 0.03, 0.15, 0.45, 1.0, 2.2 }; // of the negative log-probability
constexpr int32_t               bins   = (int32_t) edges.size() + 1;

constexpr double  prior_weight = 4.0;  // observations that the drafter's own belief counts for
constexpr double  all_weight   = 12.0; // observations that all requests count for in one
constexpr double  fade         = 0.985;

static_assert((depths + 1) * ranks * bins == Calibration::n_classes);

int32_t place_of(int32_t depth, bool first, double log_prob) {
    const auto level = std::lower_bound(edges.begin(), edges.end(), -log_prob) - edges.begin();
    return (std::min(depth, depths) * ranks + !first) * bins + (int32_t) level;
}

} // namespace

double Calibration::probability(int32_t slot, int32_t kind, double log_prob) const {
    double     result = std::exp(std::min(log_prob, 0.0)); // drafters may claim anything
    const auto follow = [&](const Cells & cells, double weight) {
        if (kind < (int32_t) cells.size() && cells[kind].trials > 0.0) {
            result = (cells[kind].hits + weight * result) / (cells[kind].trials + weight);
        }
    };
    follow(all, prior_weight);
    if (slot < (int32_t) own.size()) {
        follow(own[slot], all_weight);
    }
    return result;
}

void Calibration::observe(int32_t slot, int32_t kind, bool hit) {
    if (slot < 0 || slot >= most_slots || kind < 0 || kind >= most_classes) {
        fail(PYSPEC_ERR_ARGUMENT, "calibration: slot is %d and class %d", slot, kind);
    }
    if (slot >= (int32_t) own.size()) {
        own.resize(slot + 1);
    }
    for (Cells * cells : { &all, &own[slot] }) {
        if (kind >= (int32_t) cells->size()) {
            cells->resize((kind / n_classes + 1) * n_classes);
        }
        Cell & cell = (*cells)[kind];
        cell.hits   = fade * cell.hits + hit;
        cell.trials = fade * cell.trials + 1.0;
    }
}

void Calibration::forget(int32_t slot) {
    if (slot >= 0 && slot < (int32_t) own.size()) {
        own[slot].clear();
    }
}

void Calibration::values(int32_t slot, const Nodes & nodes, double floor, double * values, int32_t * classes) {
    best.assign(nodes.n, -1);
    for (int32_t i = 1; i < nodes.n; ++i) {
        int32_t & other = best[nodes.parents[i]];
        if (other < 0 || nodes.log_probs[i] > nodes.log_probs[other]) {
            other = i;
        }
    }
    values[0]  = 1.0;
    classes[0] = no_class;
    for (int32_t i = 1; i < nodes.n; ++i) {
        const double before = values[nodes.parents[i]];
        values[i]           = 0.0;
        classes[i]          = no_class;
        if (before >= floor) {
            classes[i] = nodes.firsts[i] + place_of(nodes.depths[i], best[nodes.parents[i]] == i, nodes.log_probs[i]);
            values[i]  = before * probability(slot, classes[i], nodes.log_probs[i]);
        }
    }
}

void Calibration::learn(int32_t slot, int32_t n, const int32_t * tokens, const int32_t * parents,
                        const int32_t * classes, int32_t n_path, const int32_t * path, const int32_t * drawn) {
    for (int32_t i = 1; i < n; ++i) {
        const int32_t at = (int32_t) (std::find(path, path + n_path, parents[i]) - path);
        if (at < n_path && classes[i] != no_class) {
            observe(slot, classes[i], tokens[i] == drawn[at]);
        }
    }
}

} // namespace pyspec
