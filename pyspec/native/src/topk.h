// Arithmetic on rows of logits. Knows no model.
#pragma once

#include <cstdint>
#include <vector>

namespace pyspec {

// Index of the largest element; of equal ones, the first. NaN is never the largest: in a row without a number, 0.
int32_t argmax(const float * logits, int32_t n);

// The k largest logits in descending order, equal ones by index, NaN last.
class TopK {
public:
    // Their indices, valid until the next call.
    const int32_t * select(const float * logits, int32_t n, int32_t k);

    // With their log-softmax over all n.
    void operator()(const float * logits, int32_t n, int32_t k, int32_t * tokens, float * log_probs);

private:
    std::vector<int32_t> heap; // kept between calls
};

} // namespace pyspec
