#include "dflash.h"

#include "engine.h"
#include "error.h"
#include "log.h"
#include "threads.h"

#include "llama-ext.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace pyspec {

namespace {

constexpr int32_t max_block = 64;

// A value of the file's metadata as text; empty: it has none.
std::string meta(const llama_model * model, const char * key) {
    char          value[64] = {};
    const int32_t n         = llama_model_meta_val_str(model, key, value, sizeof(value));
    return n < 0 ? std::string() : std::string(value);
}

} // namespace

Dflash::Dflash(const char * path, const Model & target_model, const pyspec_engine_params & params,
               llama_context * target_ctx, uint32_t n_ctx, int32_t n_threads, int32_t n_threads_batch,
               const ThreadPool & threads, ggml_abort_callback abort, void * abort_data)
    : name(path ? path : ""), target(target_ctx), n_threads_feed(n_threads_batch), n_threads_draft(n_threads) {
    const LogScope log; // every step of it is logged
    try {
        open_model(path, params);
        read_facts(target_model);
        open_context(params, target, n_ctx, n_threads, n_threads_batch);
        threads.attach(ctx);
        llama_set_abort_callback(ctx, abort, abort_data);
    } catch (...) {
        llama_free(ctx);
        llama_model_free(model);
        throw;
    }
    for (const int32_t layer : layers) {
        llama_set_embeddings_layer_inp(target, (uint32_t) layer, true);
    }
    batch = llama_batch_ext_init(ctx);
    head.bind(ctx, n_vocab);
}

Dflash::~Dflash() {
    llama_batch_ext_free(batch);
    llama_free(ctx);
    llama_model_free(model);
}

void Dflash::open_model(const char * path, const pyspec_engine_params & params) {
    check_gguf(path);
    LogScope           log;
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers       = params.n_gpu_layers;
    model = llama_model_load_from_file(path, model_params);
    if (!model) {
        fail(PYSPEC_ERR_DRAFT, "%s: %s", path, log.cause("llama.cpp cannot load it").c_str());
    }
    const std::string arch = meta(model, "general.architecture");
    if (arch != "dflash") {
        fail(PYSPEC_ERR_DRAFT, "%s is no DFlash drafter: its architecture is %s, it must be dflash", path, arch.c_str());
    }
}

void Dflash::read_facts(const Model & target_model) {
    const char * file = name.c_str();
    n_embd  = llama_model_n_embd(model);
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (n_embd != llama_model_n_embd(target_model.get())) {
        fail(PYSPEC_ERR_DRAFT, "%s was made for another target: hidden size %d, that of %s is %d", file, n_embd,
             target_model.name.c_str(), llama_model_n_embd(target_model.get()));
    }
    if (n_vocab != target_model.n_vocab) {
        fail(PYSPEC_ERR_DRAFT, "%s was made for another target: its vocabulary has %d tokens, that of %s %d", file, n_vocab,
             target_model.name.c_str(), target_model.n_vocab);
    }
    const int32_t * ids   = llama_model_target_layer_ids(model);
    const uint32_t  n_ids = llama_model_target_layer_ids_n(model);
    if (!ids || n_ids == 0) {
        fail(PYSPEC_ERR_DRAFT, "%s names no layers of its target", file);
    }
    layers.assign(ids, ids + n_ids);
    for (const int32_t layer : layers) {
        if (layer < 0 || layer > target_model.n_layer) {
            fail(PYSPEC_ERR_DRAFT, "%s was made for another target: it reads layer %d, %s has %d", file, layer,
                 target_model.name.c_str(), target_model.n_layer);
        }
    }
    n_features = (int32_t) n_ids * n_embd;
    mask_token = llama_vocab_mask(llama_model_get_vocab(model));
    if (mask_token < 0 || mask_token >= n_vocab) {
        fail(PYSPEC_ERR_DRAFT, "%s names no mask token", file);
    }
    const std::string block = meta(model, "dflash.block_size");
    facts.block_size = block.empty() ? 16 : std::atoi(block.c_str());
    if (facts.block_size < 2 || facts.block_size > max_block) {
        fail(PYSPEC_ERR_DRAFT, "%s has blocks of %d tokens; it must be 2 to %d", file, facts.block_size, max_block);
    }
    facts.selector   = llama_model_dflash_selector_top_k(model);
    facts.markov     = has_tensor(model, "markov_w1.weight");
    facts.confidence = has_tensor(model, "conf_proj.weight");
    anchor_drafts    = facts.markov && meta(model, "dflash.sample_from_anchor") != "false";
    facts.max_depth  = anchor_drafts ? facts.block_size : facts.block_size - 1;
}

void Dflash::open_context(const pyspec_engine_params & params, llama_context * target_ctx, uint32_t n_ctx,
                          int32_t n_threads, int32_t n_threads_batch) {
    llama_context_params ctx_params =
        drafter_context_params(params, n_ctx + facts.block_size, n_threads, n_threads_batch);
    const uint32_t       blocks     = params.n_seq_max * (uint32_t) facts.block_size;
    ctx_params.ctx_other     = target_ctx;
    ctx_params.n_batch       = std::min(std::max(blocks, 256u), ctx_params.n_ctx);
    ctx_params.n_ubatch      = ctx_params.n_batch; // a non-causal pass is not split
    ctx_params.n_outputs_max = blocks;

    LogScope log;
    ctx = llama_init_from_model(model, ctx_params);
    if (!ctx) {
        fail(PYSPEC_ERR_DRAFT, "cannot open %s: %s", name.c_str(), log.cause("llama.cpp gives no reason").c_str());
    }
    llama_tree_init(ctx, 1, GGML_GDN_TREE_ROW); // for the sake of its kept graphs; it drafts without, too
    // A selector's lattice comes out where hidden states would, one row a token.
    llama_set_embeddings_nextn(ctx, true, /*masked*/ facts.selector == 0);
    llama_set_causal_attn(ctx, meta(model, "dflash.attention.causal") == "true");
    n_batch     = llama_n_batch(ctx);
    facts.bytes = llama_model_size(model);
    for (const auto & [type, bytes] : llama_get_memory_breakdown(ctx)) {
        facts.bytes += bytes.context + bytes.compute;
    }
}

void Dflash::process(const char * what) {
    LogScope log;
    ++n_passes;
    const int32_t rc = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    llama_synchronize(ctx);
    check_process(rc, what, log.cause("no reason logged"));
}

void Dflash::gather(std::vector<float> & to, int32_t first, int32_t n) const {
    const size_t start = to.size();
    to.resize(start + (size_t) n * n_features);
    for (size_t k = 0; k < layers.size(); ++k) {
        const float * rows = llama_get_embeddings_layer_inp(target, (uint32_t) layers[k]);
        if (!rows) {
            fail(PYSPEC_ERR_COMPUTE, "the target gives no input of layer %d", layers[k]);
        }
        for (int32_t i = 0; i < n; ++i) {
            memcpy(to.data() + start + (size_t) i * n_features + k * n_embd, rows + (size_t) (first + i) * n_embd,
                   n_embd * sizeof(float));
        }
    }
}

void Dflash::append(Sequence & s, int32_t node) const {
    const float * row = s.tree_features.data() + (size_t) node * n_features;
    s.features.insert(s.features.end(), row, row + n_features);
}

void Dflash::listen(bool on) {
    hears = on;
    llama_pause_embeddings_layer_inp(target, !on);
}

void Dflash::pass_by(Sequence & s) const {
    s.features.clear();
    s.dflash_unheard += s.length() - s.dflash_fed;
    s.dflash_fed = s.length();
}

void Dflash::catch_up(int32_t seq, Sequence & s) {
    const bool    many      = s.length() - s.dflash_fed >= (int32_t) many_unseen;
    const int32_t n_threads = many ? n_threads_feed : n_threads_draft;
    context_threads.use(ctx, n_threads, n_threads);
    while (s.dflash_fed < s.length()) {
        const int32_t n = (int32_t) std::min<int64_t>(s.length() - s.dflash_fed, n_batch);
        llama_batch_ext_clear(batch);
        for (int32_t i = 0; i < n; ++i) {
            const llama_pos p      = s.dflash_fed + i - s.dflash_unheard;
            const llama_pos pos[4] = { p, p, p, 0 }; // of a multi-dimensional RoPE; others read the first
            const int32_t   index  = llama_batch_ext_add_embd(
                batch, seq, { s.features.data() + (size_t) i * n_features, 1, (size_t) n_features });
            if (index < 0 || !llama_batch_ext_set_pos(batch, index, pos)) {
                fail(PYSPEC_ERR_COMPUTE, "token %d of sequence %d does not fit the DFlash batch", p, seq);
            }
        }
        try {
            process("injecting into the DFlash drafter");
        } catch (...) {
            llama_memory_seq_rm(llama_get_memory(ctx), seq, s.dflash_fed - s.dflash_unheard, -1);
            throw;
        }
        s.dflash_fed += n;
        s.features.erase(s.features.begin(), s.features.begin() + (size_t) n * n_features);
    }
}

void Dflash::catch_up_if_many(int32_t seq, Sequence & s) {
    if (s.length() - s.dflash_fed >= (int32_t) many_unseen) {
        catch_up(seq, s);
    }
}

void Dflash::draft(const std::vector<Request> & requests, int32_t depth, int32_t top_k, int32_t * tokens,
                   float * log_probs, float * pairs, float * confidence) {
    for (const Request & r : requests) {
        catch_up(r.seq, *r.sequence);
    }
    context_threads.use(ctx, n_threads_draft, n_threads_draft);
    // The trained block whatever is asked for: with fewer masks the drafter would predict something else.
    const int32_t        n_rows = facts.selector || facts.markov ? facts.block_size : depth + 1;
    const int32_t        skip   = anchor_drafts ? 0 : 1;
    std::vector<int32_t> first(requests.size());
    llama_batch_ext_clear(batch);
    for (size_t i = 0; i < requests.size(); ++i) {
        const Request & r = requests[i];
        for (int32_t k = 0; k < n_rows; ++k) {
            const llama_pos p      = r.sequence->length() - r.sequence->dflash_unheard + k;
            const llama_pos pos[4] = { p, p, p, 0 };
            const int32_t   index  = llama_batch_ext_add_token(batch, r.seq, k == 0 ? r.root : mask_token);
            if (index < 0 || !llama_batch_ext_set_pos(batch, index, pos) ||
                !llama_batch_ext_set_output_logits(batch, index, facts.selector == 0)) {
                fail(PYSPEC_ERR_COMPUTE, "the block of sequence %d does not fit the DFlash batch", r.seq);
            }
            first[i] = k == 0 ? index : first[i];
        }
    }
    const auto forget_block = [&] {
        for (const Request & r : requests) {
            llama_memory_seq_rm(llama_get_memory(ctx), r.seq, r.sequence->length() - r.sequence->dflash_unheard, -1);
        }
    };
    try {
        process("a pass of the DFlash drafter");
        const float * extra = facts.selector || (confidence && facts.confidence) ? llama_get_embeddings_nextn(ctx) : nullptr;
        for (size_t i = 0; i < requests.size(); ++i) {
            for (int32_t k = 0; k < depth; ++k) {
                const size_t  at  = (i * depth + k) * top_k;
                const int32_t row = first[i] + skip + k;
                if (facts.selector) {
                    read_lattice(extra + (size_t) row * n_embd, tokens + at, log_probs + at, pairs + at * top_k);
                } else {
                    read_logits(row, top_k, tokens + at, log_probs + at);
                }
                if (confidence) {
                    confidence[i * depth + k] = extra && facts.confidence ? extra[(size_t) row * n_embd] : 1.0f;
                }
            }
        }
    } catch (...) {
        forget_block();
        throw;
    }
    forget_block();
}

void Dflash::read_logits(int32_t row, int32_t top_k, int32_t * tokens, float * log_probs) {
    const float * logits = llama_get_logits_ith(ctx, row);
    if (!logits) {
        fail(PYSPEC_ERR_COMPUTE, "the DFlash drafter returned no logits");
    }
    const int32_t n = std::min(top_k, head.n_logits());
    top(logits, head.n_logits(), n, tokens, log_probs);
    head.to_tokens(tokens, n);
    for (int32_t rank = n; rank < top_k; ++rank) {
        tokens[rank]    = tokens[0];
        log_probs[rank] = -INFINITY;
    }
}

// A row holds the candidates, then for every predecessor the scores of the candidates behind it.
void Dflash::read_lattice(const float * row, int32_t * tokens, float * log_probs, float * pairs) {
    const int32_t k = facts.selector;
    for (int32_t i = 0; i < k; ++i) {
        tokens[i] = std::clamp((int32_t) row[i], 0, n_vocab - 1);
    }
    memcpy(pairs, row + k, (size_t) k * k * sizeof(float));
    // Marginals, for a reader without use for pairs: behind the best predecessor of each candidate.
    float max = -INFINITY;
    for (int32_t i = 0; i < k; ++i) {
        log_probs[i] = pairs[i];
        for (int32_t p = 1; p < k; ++p) {
            log_probs[i] = std::max(log_probs[i], pairs[(size_t) p * k + i]);
        }
        max = std::max(max, log_probs[i]);
    }
    double sum = 0.0;
    for (int32_t i = 0; i < k; ++i) {
        sum += std::exp(log_probs[i] - max);
    }
    for (int32_t i = 0; i < k; ++i) {
        log_probs[i] -= max + (float) std::log(sum);
    }
}

void Dflash::forget(int32_t seq) {
    llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
}

} // namespace pyspec
