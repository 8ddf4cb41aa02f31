// Saving, restoring and copying one sequence.
#include "engine.h"

#include "error.h"
#include "log.h"

#include <cstring>

namespace pyspec {

namespace {

// A saved sequence: this header, then tokens, hidden rows, target memory, MTP memory, DFlash memory.
struct Header {
    char     magic[8];
    uint64_t checksum;     // of everything after the header
    uint64_t n_params;     // of the model
    uint32_t n_vocab;
    uint32_t n_embd;
    uint32_t n_seq_max;    // llama.cpp's format depends on it
    uint32_t n_tokens;
    uint32_t n_hidden;     // rows
    uint32_t mtp_fed;
    uint32_t has_mtp;
    uint32_t dflash_width; // floats of a token's features, 0 without a drafter
    uint32_t dflash_fed;
    uint32_t dflash_unheard;
    uint64_t target_bytes;
    uint64_t mtp_bytes;
    uint64_t dflash_bytes;
};

constexpr char magic[8] = { 'p', 'y', 's', 'p', 'e', 'c', '0', '2' };

uint64_t checksum(const uint8_t * data, size_t size) {
    uint64_t hash = 0xcbf29ce484222325u ^ size;
    while (size > 0) {
        uint64_t     word = 0;
        const size_t n    = size < sizeof(word) ? size : sizeof(word);
        memcpy(&word, data, n);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
        data += n;
        size -= n;
    }
    return hash;
}

void put(uint8_t *& to, const void * from, size_t size) {
    if (size > 0) {
        memcpy(to, from, size);
        to += size;
    }
}

} // namespace

size_t Engine::save(int32_t seq, void * buf, size_t size) {
    checked(seq);
    Sequence & s = ready(seq);
    if (mtp) {
        mtp->catch_up(seq, s);
    }
    if (dflash) {
        dflash->catch_up(seq, s);
    }
    Header header{};
    memcpy(header.magic, magic, sizeof(magic));
    header.n_params     = llama_model_n_params(model->get());
    header.n_vocab      = (uint32_t) model->n_vocab;
    header.n_embd       = (uint32_t) model->n_embd;
    header.n_seq_max    = (uint32_t) sequences.size();
    header.n_tokens     = (uint32_t) s.tokens.size();
    header.n_hidden     = (uint32_t) (s.hidden.size() / model->n_embd);
    header.mtp_fed      = (uint32_t) s.mtp_fed;
    header.has_mtp      = mtp ? 1 : 0;
    header.dflash_width = dflash ? (uint32_t) dflash->width() : 0;
    header.dflash_fed   = (uint32_t) s.dflash_fed; // all: there are no rows left to save
    header.dflash_unheard = (uint32_t) s.dflash_unheard;
    header.target_bytes = llama_state_seq_get_size(target.get(), seq);
    header.mtp_bytes    = mtp ? llama_state_seq_get_size(mtp->context(), seq) : 0;
    header.dflash_bytes = dflash ? llama_state_seq_get_size(dflash->context(), seq) : 0;

    const size_t tokens_bytes = s.tokens.size() * sizeof(int32_t);
    const size_t hidden_bytes = s.hidden.size() * sizeof(float);
    const size_t total = sizeof(header) + tokens_bytes + hidden_bytes + header.target_bytes + header.mtp_bytes +
                         header.dflash_bytes;
    if (!buf) {
        return total;
    }
    if (size < total) {
        fail(PYSPEC_ERR_ARGUMENT, "sequence %d needs %zu bytes to be saved; the buffer has %zu", seq, total, size);
    }
    uint8_t * const start = (uint8_t *) buf + sizeof(header);
    uint8_t *       at    = start;
    put(at, s.tokens.data(), tokens_bytes);
    put(at, s.hidden.data(), hidden_bytes);
    const auto put_memory = [&](llama_context * ctx, uint64_t bytes) {
        if (llama_state_seq_get_data(ctx, at, bytes, seq) != bytes) {
            fail(PYSPEC_ERR_COMPUTE, "llama.cpp cannot save the memory of sequence %d", seq);
        }
        at += bytes;
    };
    put_memory(target.get(), header.target_bytes);
    if (mtp) {
        put_memory(mtp->context(), header.mtp_bytes);
    }
    if (dflash) {
        put_memory(dflash->context(), header.dflash_bytes);
    }
    header.checksum = checksum(start, at - start);
    memcpy(buf, &header, sizeof(header));
    return total;
}

void Engine::restore(int32_t seq, const void * buf, size_t size) {
    checked(seq);
    if (!buf) {
        fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d is NULL", seq);
    }
    Header header;
    if (size < sizeof(header) || memcmp(buf, magic, sizeof(magic)) != 0) {
        fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d is no saved sequence", seq);
    }
    memcpy(&header, buf, sizeof(header));
    const uint8_t * at = (const uint8_t *) buf + sizeof(header);

    size_t       left = size - sizeof(header);
    const auto   take = [&](uint64_t bytes) {
        if (bytes > left) {
            fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d is truncated", seq);
        }
        const uint8_t * part = at;
        at += bytes;
        left -= bytes;
        return part;
    };
    const uint8_t * start  = at;
    const uint8_t * tokens = take((uint64_t) header.n_tokens * sizeof(int32_t));
    const uint8_t * hidden = take((uint64_t) header.n_hidden * header.n_embd * sizeof(float));
    const uint8_t * memory = take(header.target_bytes);
    const uint8_t * cache  = take(header.mtp_bytes);
    const uint8_t * blocks = take(header.dflash_bytes);
    if (left > 0 || header.checksum != checksum(start, at - start)) {
        fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d is damaged", seq);
    }
    if (header.n_params != llama_model_n_params(model->get()) || header.n_vocab != (uint32_t) model->n_vocab ||
        header.n_embd != (uint32_t) model->n_embd) {
        fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d is of another model", seq);
    }
    if (header.n_seq_max != sequences.size()) {
        fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d was saved by an engine of %u sequences; this one has %zu",
             seq, header.n_seq_max, sequences.size());
    }
    if ((header.has_mtp != 0) != (mtp != nullptr)) {
        fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d was saved %s MTP, the engine was opened %s", seq,
             header.has_mtp ? "with" : "without", mtp ? "with it" : "without it");
    }
    if (header.dflash_width != (dflash ? (uint32_t) dflash->width() : 0)) {
        fail(PYSPEC_ERR_ARGUMENT, "state to restore into sequence %d was saved %s", seq,
             !header.dflash_width ? "without a DFlash drafter, the engine has one"
             : dflash             ? "with another DFlash drafter"
                                  : "with a DFlash drafter, the engine has none");
    }
    if (header.n_tokens > n_ctx) {
        fail(PYSPEC_ERR_CONTEXT, "state to restore into sequence %d holds %u tokens; its context has %u", seq,
             header.n_tokens, n_ctx);
    }

    reset(seq);
    const auto restore_memory = [&](llama_context * ctx, const uint8_t * data, uint64_t bytes) {
        LogScope log;
        if (bytes > 0 && llama_state_seq_set_data(ctx, data, bytes, seq) == 0) {
            reset(seq);
            fail(PYSPEC_ERR_ARGUMENT, "state does not fit sequence %d: %s", seq,
                 log.cause("llama.cpp gives no reason").c_str());
        }
    };
    restore_memory(target.get(), memory, header.target_bytes);
    if (mtp) {
        restore_memory(mtp->context(), cache, header.mtp_bytes);
    }
    if (dflash) {
        restore_memory(dflash->context(), blocks, header.dflash_bytes);
    }
    Sequence & s = sequences[seq];
    s.tokens.resize(header.n_tokens);
    s.hidden.resize((size_t) header.n_hidden * header.n_embd);
    if (header.n_tokens > 0) {
        memcpy(s.tokens.data(), tokens, header.n_tokens * sizeof(int32_t));
    }
    if (header.n_hidden > 0) {
        memcpy(s.hidden.data(), hidden, s.hidden.size() * sizeof(float));
    }
    s.mtp_fed    = (int32_t) header.mtp_fed;
    s.dflash_fed = (int32_t) header.dflash_fed;
    s.dflash_unheard = (int32_t) header.dflash_unheard;
}

void Engine::copy(int32_t src, int32_t dst) {
    checked(dst);
    if (src == dst) {
        checked(src);
        return;
    }
    // Not llama_memory_seq_cp: it forgets a pending rollback of the recurrent state.
    std::vector<uint8_t> state(save(src, nullptr, 0));
    save(src, state.data(), state.size());
    restore(dst, state.data(), state.size());
}

} // namespace pyspec
