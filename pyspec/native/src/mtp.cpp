#include "mtp.h"

#include "engine.h"
#include "error.h"
#include "log.h"
#include "threads.h"

#include "ggml.h"
#include "llama-ext.h"

#include <algorithm>

namespace pyspec {

namespace {

// Beyond this many, committed tokens are fed without waiting for the next draft.
constexpr uint32_t many = 256;

// Up to this many tokens a pass, attention on a context that takes trees rounds the same however they are batched
// (ggml_flash_attn_ext_set_ordered): the drafts do not depend on when the block was fed.
constexpr uint32_t exact_ubatch = GGML_TREE_MAX_NODES;

// A drafting pass that reads less than this is done by one thread: with more, it would mostly wait for the others.
constexpr uint64_t one_thread_bytes = 4 << 20;

// What a pass reads, about: a layer's share of the weights, and the output matrix.
uint64_t pass_bytes(const Model & model) {
    return llama_model_size(model.get()) / (model.n_layer + 1) + (uint64_t) model.n_embd * model.n_vocab;
}

// Rows of the hidden state that the graph of a pass of 2 tokens with 1 output yields; 0: the graph has none.
int64_t hidden_rows(llama_context * ctx) {
    ggml_cgraph * graph = llama_graph_reserve(ctx, 2, 1, 1);
    ggml_tensor * h     = graph ? ggml_graph_get_tensor(graph, "h_nextn") : nullptr;
    return h ? h->ne[1] : 0;
}

} // namespace

Mtp::Mtp(const Model & model, const pyspec_engine_params & params, llama_context * target, uint32_t n_ctx,
         int32_t n_threads, int32_t n_threads_batch, const ThreadPool & threads, ggml_abort_callback abort,
         void * abort_data)
    : n_embd(model.n_embd), n_vocab(model.n_vocab), zeros(model.n_embd, 0.0f) {
    llama_context_params ctx_params = context_params(params, n_ctx, n_threads, n_threads_batch);
    if (pass_bytes(model) < one_thread_bytes) {
        ctx_params.n_threads = ctx_params.n_threads_batch = 1;
    }
    ctx_params.ctx_type      = LLAMA_CONTEXT_TYPE_MTP;
    ctx_params.ctx_other     = target;
    ctx_params.n_rs_seq      = 0;
    ctx_params.n_ubatch      = exact_ubatch;
    ctx_params.n_outputs_max = params.n_seq_max;
    ctx_params.kv_unified    = true; // sequences with unequal numbers of tokens share a pass

    LogScope log;
    ctx = llama_init_from_model(model.get(), ctx_params);
    if (!ctx) {
        fail(PYSPEC_ERR_DRAFT, "cannot open the MTP block of %s: %s", model.name.c_str(),
             log.cause("llama.cpp gives no reason").c_str());
    }
    llama_tree_init(ctx, exact_ubatch, GGML_GDN_TREE_ROW); // a context that takes none still drafts
    try {
        llama_set_embeddings_nextn(ctx, true, /*masked*/ false);
        const int64_t rows = hidden_rows(ctx);
        if (rows == 0) {
            fail(PYSPEC_ERR_DRAFT, "llama.cpp has no MTP graph for architecture %s", model.arch.c_str());
        }
        mixed_outputs = rows == 2;
        if (!mixed_outputs) {
            llama_set_embeddings_nextn(ctx, true, /*masked*/ true);
        }
        threads.attach(ctx);
        llama_set_abort_callback(ctx, abort, abort_data);
        n_batch = llama_n_batch(ctx);
        batch   = llama_batch_ext_init(ctx);
    } catch (...) {
        llama_free(ctx);
        throw;
    }
}

Mtp::~Mtp() {
    llama_batch_ext_free(batch);
    llama_free(ctx);
}

void Mtp::append(Sequence & s, const float * hidden, int32_t n) const {
    s.hidden.insert(s.hidden.end(), hidden, hidden + (size_t) n * n_embd);
}

uint32_t Mtp::unseen(const Sequence & s) const {
    return (uint32_t) std::max(0, s.length() - s.mtp_fed);
}

int32_t Mtp::add(int32_t seq, int32_t token, int32_t position, const float * hidden, bool output) {
    const int32_t   index = llama_batch_ext_add_token(batch, seq, token);
    const llama_pos pos   = position;
    if (index < 0 || !llama_batch_ext_set_pos(batch, index, &pos) ||
        !llama_batch_ext_set_embd_token(batch, index, { hidden, 1, (size_t) n_embd }) ||
        !llama_batch_ext_set_output_logits(batch, index, output)) {
        fail(PYSPEC_ERR_COMPUTE, "token at position %d of sequence %d does not fit the MTP batch", position, seq);
    }
    return index;
}

int32_t Mtp::add_unseen(int32_t seq, const Sequence & s, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        const int32_t position = s.mtp_fed + i;
        add(seq, s.tokens[position], position, s.hidden.data() + (size_t) i * n_embd, false);
    }
    return n;
}

void Mtp::mark_fed(Sequence & s, int32_t n) const {
    s.mtp_fed += n;
    s.hidden.erase(s.hidden.begin(), s.hidden.begin() + (size_t) n * n_embd);
}

void Mtp::process() {
    LogScope log;
    ++n_passes;
    const int32_t rc = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    llama_synchronize(ctx);
    check_process(rc, "a pass of the MTP block", log.cause("no reason logged"));
}

void Mtp::catch_up(int32_t seq, Sequence & s) {
    while (unseen(s) > 0) {
        const int32_t n = (int32_t) std::min(unseen(s), n_batch);
        llama_batch_ext_clear(batch);
        add_unseen(seq, s, n);
        try {
            process();
        } catch (...) {
            llama_memory_seq_rm(llama_get_memory(ctx), seq, s.mtp_fed, -1);
            throw;
        }
        mark_fed(s, n);
    }
}

void Mtp::catch_up_if_many(int32_t seq, Sequence & s) {
    if (unseen(s) >= many) {
        catch_up(seq, s);
    }
}

void Mtp::draft(const std::vector<Request> & requests, int32_t depth, int32_t top_k, int32_t * tokens,
                float * log_probs) {
    const size_t         n = requests.size();
    std::vector<int32_t> rows(n); // batch index of each request's output row

    uint32_t total = (uint32_t) n;
    for (const Request & r : requests) {
        total += unseen(*r.sequence);
    }
    if (!mixed_outputs || total > n_batch) {
        for (const Request & r : requests) {
            catch_up(r.seq, *r.sequence);
        }
    }

    const auto forget_draft = [&] {
        for (const Request & r : requests) {
            llama_memory_seq_rm(llama_get_memory(ctx), r.seq, r.sequence->length(), -1);
        }
    };
    try {
        llama_batch_ext_clear(batch);
        for (size_t i = 0; i < n; ++i) {
            const Request &  r = requests[i];
            const Sequence & s = *r.sequence;
            add_unseen(r.seq, s, (int32_t) unseen(s));
            const float * pending = s.hidden.empty() ? zeros.data() : s.hidden.data() + s.hidden.size() - n_embd;
            rows[i] = add(r.seq, r.root, s.length(), pending, true);
        }
        for (int32_t level = 0; level < depth; ++level) {
            process();
            if (level == 0) {
                for (const Request & r : requests) {
                    mark_fed(*r.sequence, (int32_t) unseen(*r.sequence));
                }
            }
            for (size_t i = 0; i < n; ++i) {
                const float * logits = llama_get_logits_ith(ctx, rows[i]);
                if (!logits) {
                    fail(PYSPEC_ERR_COMPUTE, "the MTP block returned no logits for sequence %d", requests[i].seq);
                }
                const size_t at = (i * depth + level) * top_k;
                top(logits, n_vocab, top_k, tokens + at, log_probs + at);
            }
            if (level + 1 == depth) {
                break;
            }
            llama_batch_ext_clear(batch); // copies the rows added below before the next pass overwrites them
            for (size_t i = 0; i < n; ++i) {
                const Request & r      = requests[i];
                const float *   hidden = llama_get_embeddings_nextn_ith(ctx, rows[i]);
                if (!hidden) {
                    fail(PYSPEC_ERR_COMPUTE, "the MTP block returned no hidden state for sequence %d", r.seq);
                }
                rows[i] = add(r.seq, tokens[(i * depth + level) * top_k], r.sequence->length() + level + 1, hidden, true);
            }
        }
    } catch (...) {
        forget_draft();
        // Of a first pass that failed, the unseen tokens may be half written.
        for (const Request & r : requests) {
            llama_memory_seq_rm(llama_get_memory(ctx), r.seq, r.sequence->mtp_fed, -1);
        }
        throw;
    }
    forget_draft();
}

void Mtp::forget(int32_t seq) {
    llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
}

} // namespace pyspec
