#include "ngram.h"

#include <algorithm>
#include <cmath>

namespace pyspec {

void Ngram::clear() {
    text.clear();
    runs = {};
}

// Where `hash` is, or the empty place where it belongs.
Ngram::Place & Ngram::Runs::place(uint64_t hash) {
    const size_t mask = latest.size() - 1; // a power of two
    size_t       at   = (hash ^ hash >> 32) & mask;
    while (latest[at].end >= 0 && latest[at].hash != hash) {
        at = (at + 1) & mask;
    }
    return latest[at];
}

void Ngram::Runs::grow() {
    std::vector<Place> old(std::max<size_t>(2 * latest.size(), 256));
    std::swap(old, latest);
    for (const Place & one : old) {
        if (one.end >= 0) {
            place(one.hash) = one;
        }
    }
}

int32_t Ngram::Runs::replace(uint64_t hash, int32_t end) {
    if (2 * (filled + 1) > latest.size()) {
        grow();
    }
    Place &       found = place(hash);
    const int32_t old   = found.end;
    filled += old < 0;
    found = { hash, end };
    return old;
}

uint64_t Ngram::hash(int32_t end, int32_t length) const {
    uint64_t h = 0;
    for (int32_t i = end - length; i < end; ++i) {
        h = (h ^ (uint32_t) text[i]) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
    }
    return h;
}

void Ngram::append(const int32_t * tokens, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        text.push_back(tokens[i]);
        const int32_t end = size();
        for (size_t k = 0; k < lengths.size(); ++k) {
            Runs & r = runs[k];
            r.before.resize(end + 1, -1);
            if (end >= lengths[k]) {
                r.before[end] = r.replace(hash(end, lengths[k]), end);
            }
        }
    }
}

// How many tokens before `end` equal those before the end of the text.
int32_t Ngram::common(int32_t end) const {
    const int32_t n      = size();
    const int32_t most   = std::min(end, longest);
    int32_t       length = 0;
    while (length < most && text[end - 1 - length] == text[n - 1 - length]) {
        ++length;
    }
    return length;
}

std::vector<std::pair<int32_t, int32_t>> Ngram::matches() const {
    std::vector<std::pair<int32_t, int32_t>> found;
    for (size_t k = 0; k < lengths.size(); ++k) {
        // Places of longer runs are met again, and different runs may share a hash.
        size_t left = 4 * scan;
        for (int32_t end = text.empty() ? -1 : runs[k].before.back(); end >= 0 && found.size() < scan && left-- > 0;
             end         = runs[k].before[end]) {
            const int32_t length = common(end);
            const bool    known  = std::any_of(found.begin(), found.end(), [end](auto & one) { return one.second == end; });
            if (length >= lengths[k] && !known) {
                found.emplace_back(length, end);
            }
        }
    }
    std::sort(found.begin(), found.end(), [](auto & a, auto & b) { return a > b; });
    if (found.size() > follow) {
        found.resize(follow);
    }
    return found;
}

int32_t Ngram::child(int32_t parent, int32_t token) {
    for (int32_t i = parent + 1; i < (int32_t) nodes.size(); ++i) {
        if (nodes[i].parent == parent && nodes[i].token == token) {
            return i;
        }
    }
    nodes.push_back({ token, parent, nodes[parent].depth + 1, 0.0, 0, 0.0, 0.0 });
    return (int32_t) nodes.size() - 1;
}

const std::vector<Ngram::Node> & Ngram::draft(int32_t depth, int32_t max_nodes) {
    const int32_t n = size();
    nodes.assign(1, { text.back(), -1, 0, 0.0, 0, 0.0, 0.0 });
    if (depth < 1 || max_nodes < 2) {
        return nodes;
    }
    const auto found  = matches();
    double     factor = 1.0;
    for (const auto & [length, end] : found) {
        const double ratio  = (double) length / found[0].first;
        const double weight = factor * ratio * ratio;
        int32_t      node   = 0;
        nodes[0].weight += weight;
        for (int32_t level = 0; level < depth; ++level) {
            node = child(node, text[end + level % (n - end)]);
            nodes[node].weight += weight;
            nodes[node].length = std::max(nodes[node].length, length + level);
        }
        factor *= recency;
    }
    for (size_t i = 1; i < nodes.size(); ++i) {
        Node &       node   = nodes[i];
        const Node & parent = nodes[node.parent];
        node.log_prob       = std::log(node.weight / (parent.weight + doubt / ((double) node.length * node.length)));
        node.total          = parent.total + node.log_prob;
    }
    cut(max_nodes);
    return nodes;
}

// Keeps the most probable nodes. None scores above its parent, so parents stay.
void Ngram::cut(int32_t max_nodes) {
    if ((int32_t) nodes.size() <= max_nodes) {
        return;
    }
    order.resize(nodes.size());
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = (int32_t) i;
    }
    std::sort(order.begin(), order.end(), [this](int32_t a, int32_t b) {
        if (nodes[a].total != nodes[b].total) {
            return nodes[a].total > nodes[b].total;
        }
        return nodes[a].depth != nodes[b].depth ? nodes[a].depth < nodes[b].depth : a < b;
    });
    order.resize(max_nodes);
    std::sort(order.begin(), order.end());
    for (int32_t i = 0; i < max_nodes; ++i) { // order[i] >= i: nothing is overwritten before it is read
        Node node   = nodes[order[i]];
        node.parent = node.parent < 0 ? -1 : (int32_t) (std::lower_bound(order.begin(), order.begin() + i, node.parent) - order.begin());
        nodes[i]    = node;
    }
    nodes.resize(max_nodes);
}

} // namespace pyspec
