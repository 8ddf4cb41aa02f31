// A DFlash drafter (llama.cpp's architecture dflash) in a context of its own.
//
// It reads the inputs of a few of the target's layers, fused, through its K/V cache, and predicts a block of tokens
// behind the last one in a single non-causal pass.
#pragma once

#include "draft_head.h"
#include "model.h"
#include "sequence.h"
#include "threads.h"
#include "topk.h"

#include "llama.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyspec {

class Dflash {
public:
    Dflash(const char * path, const Model & target_model, const pyspec_engine_params & params, llama_context * target,
           uint32_t n_ctx, int32_t n_threads, int32_t n_threads_batch, const ThreadPool & threads,
           ggml_abort_callback abort, void * abort_data);
    ~Dflash();
    Dflash(const Dflash &)             = delete;
    Dflash & operator=(const Dflash &) = delete;

    // Whether it hears the target: features are kept only then.
    void listen(bool on);
    bool listens() const { return hears; }
    // The committed tokens that it has not been fed pass it by.
    void pass_by(Sequence & s) const;

    // Features of n tokens of the target's last pass, from batch index `first` on, appended to `to`.
    void gather(std::vector<float> & to, int32_t first, int32_t n) const;
    // Features of one node, out of those that gather() took of a tree.
    void append(Sequence & s, int32_t node) const;

    // Injects the features of the committed tokens that the drafter has not seen.
    void catch_up(int32_t seq, Sequence & s);
    // The same, but only once many have gathered: they take memory while nothing is drafted.
    void catch_up_if_many(int32_t seq, Sequence & s);

    struct Request {
        int32_t    seq;
        int32_t    root;
        Sequence * sequence;
    };
    void draft(const std::vector<Request> & requests, int32_t depth, int32_t top_k, int32_t * tokens, float * log_probs,
               float * pairs, float * confidence);

    // Of drafting passes: as many as are best for verify passes.
    void               set_threads(int32_t n) { n_threads_draft = n; }
    void               forget(int32_t seq);
    pyspec_dflash_info info() const { return facts; }
    llama_context *    context() const { return ctx; }
    int32_t            width() const { return n_features; } // floats of a token's features
    int64_t            n_passes = 0;
    DraftHead          head;

private:
    void open_model(const char * path, const pyspec_engine_params & params);
    void read_facts(const Model & target_model);
    void open_context(const pyspec_engine_params & params, llama_context * target, uint32_t n_ctx, int32_t n_threads,
                      int32_t n_threads_batch);
    void process(const char * what);
    void read_logits(int32_t row, int32_t top_k, int32_t * tokens, float * log_probs);
    void read_lattice(const float * row, int32_t * tokens, float * log_probs, float * pairs);

    std::string          name;
    llama_model *        model  = nullptr;
    llama_context *      target = nullptr;
    llama_context *      ctx    = nullptr;
    llama_batch_ext *    batch  = nullptr;
    pyspec_dflash_info   facts{};
    bool                 hears         = true;
    bool                 anchor_drafts = false; // the root's own row predicts the first token (DSpark)
    int32_t              n_embd     = 0;        // of the target and of the drafter
    int32_t              n_vocab    = 0;
    int32_t              n_features = 0;
    int32_t              mask_token = -1;
    uint32_t             n_batch    = 0;
    const int32_t        n_threads_feed;
    int32_t              n_threads_draft;
    ContextThreads       context_threads;
    std::vector<int32_t> layers;                // of the target
    TopK                 top;
};

} // namespace pyspec
