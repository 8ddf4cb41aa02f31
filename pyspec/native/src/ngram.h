// What followed the same tokens before, in one sequence. Reference: pyspec/reference/ngram.py. Knows no model.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pyspec {

class Ngram {
public:
    struct Node {
        int32_t token;
        int32_t parent;
        int32_t depth;
        double  weight;   // of the continuations that pass it
        int32_t length;   // of the longest match in front of it
        double  log_prob; // given its parent
        double  total;    // of its path
    };

    void clear();
    void append(const int32_t * tokens, int32_t n);

    // (length, position behind it) of earlier places that end as the text does, the best first.
    std::vector<std::pair<int32_t, int32_t>> matches() const;

    // Their continuations as a tree of at most max_nodes nodes; node 0 is the last token.
    const std::vector<Node> & draft(int32_t depth, int32_t max_nodes);


    int32_t size() const { return (int32_t) text.size(); }

private:
    static constexpr std::array<int32_t, 3> lengths = { 5, 3, 2 };
    static constexpr size_t                 scan    = 16;
    static constexpr int32_t                longest = 32;
    static constexpr size_t                 follow  = 4; // matches whose continuations are followed
    static constexpr double                 recency = 0.8;
    static constexpr double                 doubt   = 8.0;

    // A run of tokens is known by the position behind it: there its continuation begins.
    struct Place {
        uint64_t hash = 0;
        int32_t  end  = -1; // -1: empty
    };
    struct Runs {
        std::vector<Place>   latest; // of every hash its latest position: open addressing, at most half full
        size_t               filled = 0;
        std::vector<int32_t> before; // [position] of the same run before, or -1

        int32_t replace(uint64_t hash, int32_t end); // the latest position until now, or -1
        void    grow();
        Place & place(uint64_t hash);
    };

    uint64_t hash(int32_t end, int32_t length) const;
    int32_t  common(int32_t end) const;
    int32_t  child(int32_t parent, int32_t token);
    void     cut(int32_t max_nodes);

    std::vector<int32_t>             text;
    std::array<Runs, lengths.size()> runs;
    std::vector<Node>                nodes;
    std::vector<int32_t>             order;
};

} // namespace pyspec
