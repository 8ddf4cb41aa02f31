// Parts of the native core that need no model: trees, top-k, errors.
#include "native_check.h"

#include "error.h"
#include "ngram.h"
#include "pilot.h"
#include "topk.h"
#include "tree.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <random>
#include <thread>

using namespace pyspec;

namespace {

constexpr int32_t n_vocab = 100;

// The status that checking a tree of these tokens and parents ends with.
pyspec_status check_tree(const std::vector<int32_t> & tokens, const std::vector<int32_t> & parents, int32_t max_nodes = 8) {
    const pyspec_tree tree{ 3, (int32_t) tokens.size(), tokens.data(), parents.data() };
    return guard([&] { checked_tree(tree, max_nodes, n_vocab); });
}

Tree make_tree(const std::vector<int32_t> & tokens, const std::vector<int32_t> & parents) {
    return checked_tree({ 0, (int32_t) tokens.size(), tokens.data(), parents.data() }, 64, n_vocab);
}

pyspec_status check_path_of(const Tree & tree, const std::vector<int32_t> & path) {
    return guard([&] { check_path(tree, 3, path.data(), (int32_t) path.size()); });
}

} // namespace

// ---- trees ----

TEST(tree_shapes) {
    CHECK(make_tree({ 5 }, { -1 }).chain);
    CHECK(make_tree({ 5, 6, 7 }, { -1, 0, 1 }).chain);
    CHECK(!make_tree({ 5, 6, 7 }, { -1, 0, 0 }).chain);
    CHECK(!make_tree({ 5, 6, 7, 8 }, { -1, 0, 1, 1 }).chain);
    CHECK(make_tree({ 5, 6 }, { -1, 0 }).size() == 2);
}

TEST(tree_refusals) {
    CHECK(check_tree({}, {}) == PYSPEC_ERR_TREE);
    CHECK_MESSAGE(last_error(), "tree of sequence 3 has 0 nodes");
    CHECK(check_tree({ 1, 2, 3 }, { -1, 0, 1 }, 2) == PYSPEC_ERR_TREE);
    CHECK_MESSAGE(last_error(), "has 3 nodes; the engine was opened for 2");
    CHECK(check_tree({ 1 }, { 0 }) == PYSPEC_ERR_TREE);
    CHECK_MESSAGE(last_error(), "the root has parent 0; it must be -1");
    CHECK(check_tree({ 1, 2, 3, 4 }, { -1, 0, 0, 5 }) == PYSPEC_ERR_TREE);
    CHECK_MESSAGE(last_error(), "tree of sequence 3: node 3 has parent 5; a parent must come before its child");
    CHECK(check_tree({ 1, 2 }, { -1, 1 }) == PYSPEC_ERR_TREE);
    CHECK(check_tree({ 1, 2 }, { -1, -1 }) == PYSPEC_ERR_TREE);
    CHECK(check_tree({ 1, 2 }, { -1, std::numeric_limits<int32_t>::min() }) == PYSPEC_ERR_TREE);
    CHECK(check_tree({ 1, n_vocab }, { -1, 0 }) == PYSPEC_ERR_TREE);
    CHECK_MESSAGE(last_error(), "node 1 has token 100; the vocabulary has 100");
    CHECK(check_tree({ -1 }, { -1 }) == PYSPEC_ERR_TREE);

    const int32_t token = 1;
    CHECK(guard([&] { checked_tree({ 0, 1, nullptr, &token }, 8, n_vocab); }) == PYSPEC_ERR_ARGUMENT);
    CHECK_MESSAGE(last_error(), "tokens is NULL");
    CHECK(guard([&] { checked_tree({ 0, 1, &token, nullptr }, 8, n_vocab); }) == PYSPEC_ERR_ARGUMENT);
    CHECK(guard([&] { checked_tree({ 0, -5, &token, &token }, 8, n_vocab); }) == PYSPEC_ERR_TREE);
}

TEST(paths) {
    const Tree tree = make_tree({ 9, 1, 2, 3, 4 }, { -1, 0, 0, 1, 3 });
    CHECK(check_path_of(tree, { 0 }) == PYSPEC_OK);
    CHECK(check_path_of(tree, { 0, 2 }) == PYSPEC_OK);
    CHECK(check_path_of(tree, { 0, 1, 3, 4 }) == PYSPEC_OK);
    CHECK(check_path_of(tree, {}) == PYSPEC_ERR_ARGUMENT);
    CHECK(check_path_of(tree, { 1 }) == PYSPEC_ERR_ARGUMENT);
    CHECK_MESSAGE(last_error(), "must start at the root");
    CHECK(check_path_of(tree, { 0, 3 }) == PYSPEC_ERR_ARGUMENT);
    CHECK_MESSAGE(last_error(), "node 3 is no child of node 0");
    CHECK(check_path_of(tree, { 0, 1, 3, 4, 4 }) == PYSPEC_ERR_ARGUMENT);
    CHECK(check_path_of(tree, { 0, 5 }) == PYSPEC_ERR_ARGUMENT);
    CHECK(check_path_of(tree, { 0, -1 }) == PYSPEC_ERR_ARGUMENT);
    CHECK(check_path_of(tree, { 0, 1, 3, 4, 0, 1 }) == PYSPEC_ERR_ARGUMENT);
    CHECK(guard([&] { check_path(tree, 0, nullptr, 1); }) == PYSPEC_ERR_ARGUMENT);
}

TEST(children) {
    const Tree tree = make_tree({ 9, 1, 2, 3, 1, 2 }, { -1, 0, 0, 1, 1, 0 });
    CHECK(child_with_token(tree, 0, 1) == 1);
    CHECK(child_with_token(tree, 0, 2) == 2); // of two, the first
    CHECK(child_with_token(tree, 1, 1) == 4);
    CHECK(child_with_token(tree, 0, 3) == -1);
    CHECK(child_with_token(tree, 5, 1) == -1);
}

// ---- arithmetic ----

namespace {

// As TopK, by sorting.
void check_top_k(const std::vector<float> & logits, int32_t k) {
    const int32_t        n = (int32_t) logits.size();
    std::vector<int32_t> order(n);
    for (int32_t i = 0; i < n; ++i) {
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    double sum = 0;
    for (float logit : logits) {
        sum += std::exp((double) logit - logits[order[0]]);
    }
    std::vector<int32_t> tokens(k);
    std::vector<float>   log_probs(k);
    TopK                 top;
    top(logits.data(), n, k, tokens.data(), log_probs.data());
    CHECK(std::equal(tokens.begin(), tokens.end(), order.begin()));
    for (int32_t i = 0; i < k; ++i) {
        const double expected = (double) logits[tokens[i]] - logits[order[0]] - std::log(sum);
        CHECK(std::isinf(expected) ? log_probs[i] == expected : std::abs(log_probs[i] - expected) < 1e-4);
    }
    CHECK(argmax(logits.data(), n) == order[0]);
}

} // namespace

TEST(top_k_random) {
    std::mt19937 random(1);
    for (int32_t n : { 1, 2, 7, 100, 5000 }) {
        std::normal_distribution<float>        normal(0, 5);
        std::uniform_int_distribution<int32_t> coarse(-3, 3);
        std::vector<float>                     logits(n);
        for (int32_t k : { 1, 2, 5, 64, n }) {
            std::generate(logits.begin(), logits.end(), [&] { return normal(random); });
            check_top_k(logits, std::min(k, n));
            std::generate(logits.begin(), logits.end(), [&] { return (float) coarse(random); }); // many ties
            check_top_k(logits, std::min(k, n));
        }
    }
}

TEST(top_k_extremes) {
    const float inf = std::numeric_limits<float>::infinity();
    check_top_k({ -inf, 3.0f, -inf, 1.0f }, 4);
    check_top_k({ 1e4f, -1e4f, 9.9e3f }, 3);
    check_top_k({ 0.0f, 0.0f, 0.0f }, 2);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float all_nan[] = { nan, nan };
    CHECK(argmax(all_nan, 2) == 0);
}

TEST(argmax_is_the_first_of_the_greatest) {
    const float  nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    std::mt19937 random(2);
    for (int32_t n : { 1, 2, 63, 64, 65, 1023, 1024, 1025, 2047, 2049, 3000, 5000 }) {
        for (int round = 0; round < 40; ++round) {
            const int32_t      levels = 1 + (int32_t) (random() % 50); // few: ties, also across blocks
            std::vector<float> logits(n);
            for (float & logit : logits) {
                const uint32_t kind = random() % 20;
                logit = round % 4 == 1 && kind < 10 ? nan : round % 4 == 2 && kind < 15 ? -inf
                        : (float) (random() % levels) - 25.0f;
            }
            if (round % 4 == 1) {
                logits[0] = nan; // in front, too, where a running maximum would keep it
            }
            int32_t expected = -1;
            for (int32_t i = 0; i < n; ++i) {
                if (!std::isnan(logits[i]) && (expected < 0 || logits[i] > logits[expected])) {
                    expected = i;
                }
            }
            CHECK(argmax(logits.data(), n) == std::max(expected, 0));
        }
    }
    std::vector<float> row(3000, nan);
    CHECK(argmax(row.data(), 3000) == 0);
    row[2500] = -inf; // no number either: whoever asks looks at the logit, and neither is one to take
    CHECK(!std::isfinite(row[argmax(row.data(), 3000)]));
    row[2999] = -1e30f;
    CHECK(argmax(row.data(), 3000) == 2999);
    row[7] = inf;
    CHECK(argmax(row.data(), 3000) == 7);
}

// ---- errors ----

TEST(ngram_drafts_continuations_whatever_the_text) {
    std::mt19937 random(5);
    Ngram        ngram;
    for (int round = 0; round < 200; ++round) {
        ngram.clear();
        std::vector<int32_t> text;
        const int            n_vocab = 1 + (int) (random() % 4);
        for (int step = 0; step < 40; ++step) {
            std::vector<int32_t> added(1 + random() % 3);
            for (int32_t & token : added) {
                token = (int32_t) (random() % n_vocab);
            }
            text.insert(text.end(), added.begin(), added.end());
            ngram.append(added.data(), (int32_t) added.size());
            const int32_t depth = (int32_t) (random() % 65), max_nodes = 1 + (int32_t) (random() % 64);
            const auto &  nodes = ngram.draft(depth, max_nodes);
            CHECK(!nodes.empty() && (int32_t) nodes.size() <= max_nodes);
            CHECK(nodes[0].token == text.back() && nodes[0].parent == -1);
            for (size_t i = 1; i < nodes.size(); ++i) {
                CHECK(nodes[i].parent >= 0 && nodes[i].parent < (int32_t) i);
                CHECK(nodes[i].depth == nodes[nodes[i].parent].depth + 1 && nodes[i].depth <= depth);
                CHECK(nodes[i].log_prob < 0.0 && std::isfinite(nodes[i].log_prob));
            }
            for (const auto & [length, end] : ngram.matches()) {
                CHECK(length >= 2 && end >= length && end < (int32_t) text.size());
                CHECK(std::equal(text.end() - length, text.end(), text.begin() + end - length));
            }
        }
    }
}

TEST(calibration_learns_what_was_drawn) {
    Calibration                calibration;
    const std::vector<int32_t> tokens = { 5, 6, 7, 8 }, parents = { -1, 0, 0, 1 }, depths = { 0, 1, 1, 2 }, firsts = { 0, 0, 60, 0 };
    const std::vector<double>  log_probs = { 0.0, -0.1, -1.5, -0.1 };
    const Calibration::Nodes   nodes     = { 4, parents.data(), depths.data(), log_probs.data(), firsts.data() };
    std::vector<double>        values(4);
    std::vector<int32_t>       classes(4);
    const std::vector<int32_t> path = { 0, 1 }, drawn = { 6, 9 };
    for (int round = 0; round < 200; ++round) {
        calibration.values(3, nodes, 0.0, values.data(), classes.data());
        calibration.learn(3, 4, tokens.data(), parents.data(), classes.data(), 2, path.data(), drawn.data());
    }
    calibration.values(3, nodes, 0.0, values.data(), classes.data());
    CHECK(values[0] == 1.0 && values[1] > 0.9 && values[2] < 0.1 && values[3] < 0.1);
    CHECK(classes[0] == Calibration::no_class && classes[1] < 60 && classes[2] >= 60);
    CHECK(calibration.probability(9, classes[1], -0.1) > 0.9); // what all have taught
    calibration.values(3, nodes, 2.0, values.data(), classes.data());
    CHECK(values[1] == 0.0 && classes[3] == Calibration::no_class);
    calibration.forget(3);
    calibration.forget(1000000);
}

TEST(pilots_draft_trees_within_their_limits) {
    std::mt19937               random(6);
    Ngram                      ngram;
    Calibration                calibration;
    const std::vector<int32_t> sizes = { 2, 3, 4, 8 };
    const std::vector<double>  costs = { 0.01, 0.02, 0.03, 0.07 };
    pyspec_pilot               rules{};
    rules.depth         = 8;
    rules.max_nodes     = 8;
    rules.root_ms       = 1.0;
    rules.n_sizes       = 4;
    rules.sizes         = sizes.data();
    rules.costs_ms      = costs.data();
    rules.fade          = 0.9;
    rules.recent_tokens = rules.recent_ms = 1.0;
    Pilot   pilot(rules, ngram, calibration);
    int32_t drafted = 0;
    int32_t start[] = { 1, 2, 3, 1, 2, 3, 1 };
    ngram.append(start, 7);
    for (int step = 0; step < 2000; ++step) {
        const int32_t       depth = (int32_t) (random() % 9), most = 1 + (int32_t) (random() % 8);
        const Pilot::Tree & tree = pilot.draft(depth, most);
        const int32_t       n    = tree.size();
        CHECK(n >= 1 && n <= most && tree.parents[0] == -1);
        for (int32_t i = 1; i < n; ++i) {
            CHECK(tree.parents[i] >= 0 && tree.parents[i] < i && tree.depths[i] == tree.depths[tree.parents[i]] + 1);
            CHECK(tree.depths[i] <= depth);
        }
        CHECK((n > 1) == (pilot.gain() > 0.0));
        const int32_t last = n - 1; // the path to the last node, behind which something is drawn
        std::vector<int32_t> path, drawn;
        for (int32_t node = last; node >= 0; node = tree.parents[node]) {
            path.insert(path.begin(), node);
        }
        for (size_t i = 1; i < path.size(); ++i) {
            drawn.push_back(tree.tokens[path[i]]);
        }
        drawn.push_back((int32_t) (random() % 3));
        pilot.accept(path.data(), drawn.data(), (int32_t) path.size(), 1.0);
        drafted += n - 1;
    }
    CHECK(drafted > 1000 && rules.recent_tokens > 1.0 && std::isfinite(rules.after_ms));
}

TEST(pilots_learn_what_trees_do_to_the_step_behind_them) {
    Ngram                      ngram;
    Calibration                calibration;
    const std::vector<int32_t> sizes = { 2 };
    const std::vector<double>  costs = { 0.1 };
    pyspec_pilot               rules{};
    rules.depth         = 1;
    rules.max_nodes     = 2;
    rules.root_ms       = 1.0;
    rules.n_sizes       = 1;
    rules.sizes         = sizes.data();
    rules.costs_ms      = costs.data();
    rules.fade          = 0.9;
    rules.recent_tokens = rules.recent_ms = 1.0;
    Pilot         pilot(rules, ngram, calibration);
    const int32_t start[] = { 1, 2, 3, 1, 2, 3, 1, 2 }, path[] = { 0, 1 };
    ngram.append(start, 8);
    const auto step = [&](int32_t max_nodes, double ms) { // the text goes on, with a tree or without
        const Pilot::Tree & tree = pilot.draft(1, max_nodes);
        const int32_t       next = ngram.size() % 3 + 1, drawn[] = { next, next % 3 + 1 };
        CHECK(tree.size() == max_nodes && (max_nodes == 1 || tree.tokens[1] == next));
        pilot.accept(path, drawn, max_nodes, ms);
    };
    step(1, 9.0); // behind no tree
    step(1, 9.0);
    CHECK(rules.after_ms == 0.0);
    rules.recent_tokens = 3.0;
    rules.recent_ms     = 5.0;
    step(2, 2.0);
    CHECK(std::abs(rules.recent_tokens - (0.9 * 3.0 + 2)) < 1e-9 && std::abs(rules.recent_ms - (0.9 * 5.0 + 2.0)) < 1e-9);
    step(1, 99.0); // delayed from outside
    CHECK(rules.after_ms > 0.0 && rules.after_ms < 0.06);
    step(2, 2.0);
    const double before = pilot.gain();
    for (int round = 0; round < 100; ++round) {
        step(2, 2.0);
        step(1, 1.3);
        step(1, 1.0);
    }
    CHECK(std::abs(rules.after_ms - 0.3) < 0.01);
    rules.recent_tokens = rules.recent_ms = 1.0;
    step(2, 2.0);
    CHECK(pilot.gain() < 1.0 - 0.1 - 0.2 && before > 0.0); // of at most one token, columns and after_ms are paid
}

TEST(guard_turns_exceptions_into_statuses) {
    CHECK(guard([] {}) == PYSPEC_OK);
    CHECK(guard([] { fail(PYSPEC_ERR_DRAFT, "no %s in %d", "block", 7); }) == PYSPEC_ERR_DRAFT);
    CHECK_MESSAGE(last_error(), "no block in 7");
    CHECK(last_status() == PYSPEC_ERR_DRAFT);
    CHECK(guard([] {}) == PYSPEC_OK);
    CHECK_MESSAGE(last_error(), "no block in 7"); // success leaves the last failure
    CHECK(guard([] { throw std::bad_alloc(); }) == PYSPEC_ERR_MEMORY);
    CHECK_MESSAGE(last_error(), "out of memory");
    CHECK(guard([] { throw std::runtime_error("two\nlines"); }) == PYSPEC_ERR_COMPUTE);
    CHECK_MESSAGE(last_error(), "two lines");
    CHECK(guard([] { throw 42; }) == PYSPEC_ERR_COMPUTE);
    CHECK_MESSAGE(last_error(), "unknown type");
    CHECK(guard_value<int>(-9, [] { return 5; }) == 5);
    CHECK(guard_value<int>(-9, []() -> int { fail(PYSPEC_ERR_STATE, "x"); }) == -9);
}

TEST(long_messages_are_cut) {
    const std::string text(10000, 'a');
    CHECK(guard([&] { fail(PYSPEC_ERR_MODEL, "%s", text.c_str()); }) == PYSPEC_ERR_MODEL);
    CHECK(strlen(last_error()) > 500 && strlen(last_error()) < text.size());
    CHECK(guard([&] { throw std::runtime_error(text); }) == PYSPEC_ERR_COMPUTE);
    CHECK(strlen(last_error()) > 500 && strlen(last_error()) < text.size());
}

TEST(each_thread_has_its_own_error) {
    guard([] { fail(PYSPEC_ERR_STATE, "mine"); });
    std::thread([] {
        CHECK(strcmp(last_error(), "") == 0);
        CHECK(last_status() == PYSPEC_OK);
        guard([] { fail(PYSPEC_ERR_DRAFT, "theirs"); });
        CHECK_MESSAGE(last_error(), "theirs");
    }).join();
    CHECK_MESSAGE(last_error(), "mine");
}

int main(int argc, char ** argv) {
    return check::run(argc > 1 ? argv[1] : nullptr);
}
