// The model's own MTP block as a drafter, in a context of its own.
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

class Mtp {
public:
    Mtp(const Model & model, const pyspec_engine_params & params, llama_context * target, uint32_t n_ctx,
        int32_t n_threads, int32_t n_threads_batch, const ThreadPool & threads, ggml_abort_callback abort,
        void * abort_data);
    ~Mtp();
    Mtp(const Mtp &)             = delete;
    Mtp & operator=(const Mtp &) = delete;

    // Remembers the hidden states of tokens that have just been appended to the sequence.
    void append(Sequence & s, const float * hidden, int32_t n) const;

    // Feeds the committed tokens that the block has not seen.
    void catch_up(int32_t seq, Sequence & s);
    // The same, but only once many have gathered.
    void catch_up_if_many(int32_t seq, Sequence & s);

    struct Request {
        int32_t    seq;
        int32_t    root;
        Sequence * sequence;
    };
    void draft(const std::vector<Request> & requests, const pyspec_mtp_drafts & out);

    static constexpr int32_t max_width = 8;

    // Of drafting passes: as many as are best for verify passes, which are larger.
    void            set_threads(int32_t n) { n_threads_draft = one_thread ? 1 : n; }
    void            forget(int32_t seq);
    llama_context * context() const { return ctx; }
    int64_t         n_passes = 0;
    DraftHead       head;

private:
    struct Growth;

    void add_roots(const std::vector<Request> & requests, std::vector<Growth> & growths);
    void read_level(Growth & growth, size_t request, int32_t level, const pyspec_mtp_drafts & out);
    void add_level(const Request & request, Growth & growth, bool tree);
    void forget_draft(const std::vector<Request> & requests);
    int32_t  add(int32_t seq, int32_t token, int32_t position, const float * hidden, bool output);
    int32_t  add_unseen(int32_t seq, const Sequence & s, int32_t n);
    void     mark_fed(Sequence & s, int32_t n) const;
    void     process();
    uint32_t unseen(const Sequence & s) const;

    const int32_t         n_embd;
    const int32_t         n_vocab;
    const bool            one_thread; // a drafting pass reads so little that more would wait for each other
    const int32_t         n_threads_feed;
    int32_t               n_threads_draft;
    ContextThreads        context_threads;
    llama_context *       ctx   = nullptr;
    llama_batch_ext *     batch = nullptr;
    uint32_t              n_batch = 0;
    bool                  trees         = false; // the context takes trees
    bool                  mixed_outputs = true; // hidden states of all rows come out, not only of output rows
    TopK                  top;
    std::vector<float>    zeros;
};

} // namespace pyspec
