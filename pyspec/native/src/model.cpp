#include "model.h"

#include "error.h"
#include "log.h"

#include "llama-model.h" // private: layer kinds and state sizes have no public accessor

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include <sys/stat.h>

namespace pyspec {

namespace {

void start_llama() {
    static std::once_flag once;
    std::call_once(once, llama_backend_init);
}

llama_load_mode load_mode(bool mmap, bool mlock) {
    if (mmap) {
        return mlock ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MMAP;
    }
    return mlock ? LLAMA_LOAD_MODE_MLOCK : LLAMA_LOAD_MODE_NONE;
}

// Models that this library has loaded, while they live.
std::mutex                                 loaded_mutex;
std::map<llama_model *, std::weak_ptr<Model>> loaded;

void remember(const std::shared_ptr<Model> & model) {
    const std::lock_guard<std::mutex> lock(loaded_mutex);
    for (auto it = loaded.begin(); it != loaded.end();) {
        it = it->second.expired() ? loaded.erase(it) : std::next(it);
    }
    loaded[model->get()] = model;
}

std::shared_ptr<Model> recall(llama_model * model) {
    const std::lock_guard<std::mutex> lock(loaded_mutex);
    const auto                        it = loaded.find(model);
    return it == loaded.end() ? nullptr : it->second.lock();
}

void copy_string(char * to, size_t size, const std::string & from) {
    snprintf(to, size, "%s", from.c_str());
}

} // namespace

// What llama.cpp would only report as a failure to load.
void check_gguf(const char * path) {
    if (!path || !*path) {
        fail(PYSPEC_ERR_ARGUMENT, "path of the model is empty");
    }
    struct stat info;
    if (stat(path, &info) != 0) {
        fail(PYSPEC_ERR_MODEL, "%s: %s", path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        fail(PYSPEC_ERR_MODEL, "%s: not a regular file", path);
    }
    FILE * file = fopen(path, "rb");
    if (!file) {
        fail(PYSPEC_ERR_MODEL, "%s: %s", path, strerror(errno));
    }
    char         magic[4];
    const size_t n = fread(magic, 1, sizeof(magic), file);
    fclose(file);
    if (n != sizeof(magic) || memcmp(magic, "GGUF", sizeof(magic)) != 0) {
        fail(PYSPEC_ERR_MODEL, "%s: not a GGUF file", path);
    }
}

bool has_tensor(const llama_model * model, const char * name) {
    return model->get_tensor(name) != nullptr;
}

std::shared_ptr<Model> Model::load(const char * path, const pyspec_engine_params & params, Progress progress,
                                   void * user) {
    check_gguf(path);
    LogScope log;
    start_llama();

    struct Watch {
        Progress progress;
        void *   user;
        bool     given_up;
    } watch{ progress, user, false };

    const float * shares     = params.tensor_split;
    const size_t  max_shares = std::size(params.tensor_split);
    if (llama_max_devices() > max_shares) {
        fail(PYSPEC_ERR_MODEL, "llama.cpp was built for %zu devices; pyspec knows %zu", llama_max_devices(), max_shares);
    }

    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers       = params.n_gpu_layers;
    model_params.split_mode         = (llama_split_mode) params.split_mode;
    model_params.main_gpu           = params.main_gpu;
    model_params.tensor_split       = std::any_of(shares, shares + max_shares, [](float x) { return x > 0; }) ? shares : nullptr;
    model_params.load_mode          = load_mode(params.use_mmap, params.use_mlock);
    model_params.load_mtp           = params.mtp;
    model_params.progress_callback_user_data = &watch;
    model_params.progress_callback = [](float fraction, void * data) {
        auto & w   = *(Watch *) data;
        w.given_up = w.given_up || (w.progress && !w.progress(fraction, w.user));
        return !w.given_up;
    };

    llama_model * raw = llama_model_load_from_file(path, model_params);
    if (!raw && watch.given_up) {
        fail(PYSPEC_ERR_ABORTED, "%s: loading was given up", path);
    }
    if (!raw) {
        fail(PYSPEC_ERR_MODEL, "%s: %s", path, log.cause("llama.cpp cannot load it").c_str());
    }
    std::shared_ptr<Model> model(new Model(raw, true, path));
    remember(model);
    return model;
}

std::shared_ptr<Model> Model::attach(llama_model * model) {
    if (!model) {
        fail(PYSPEC_ERR_ARGUMENT, "llama_model to attach to is NULL");
    }
    const LogScope log;
    start_llama();
    if (std::shared_ptr<Model> known = recall(model)) {
        return known;
    }
    return std::shared_ptr<Model>(new Model(model, false, "attached model"));
}

Model::Model(llama_model * raw, bool own, std::string called) : name(std::move(called)), model(raw), owned(own) {
    try {
        read_facts();
        check_usable();
    } catch (...) {
        if (owned) {
            llama_model_free(model);
        }
        throw;
    }
}

Model::~Model() {
    if (owned) {
        llama_model_free(model);
    }
}

void Model::read_facts() {
    const llama_hparams & hparams = model->hparams;

    arch         = model->arch_name();
    n_vocab      = llama_vocab_n_tokens(vocab());
    n_embd       = llama_model_n_embd_out(model);
    n_ctx_train  = llama_model_n_ctx_train(model);
    n_layer      = (int32_t) hparams.n_layer();
    is_hybrid    = llama_model_is_hybrid(model);
    is_recurrent = llama_model_is_recurrent(model);

    for (int32_t i = 0; i < n_layer; ++i) {
        if (is_recurrent || (is_hybrid && hparams.is_recr(i))) {
            ++n_layer_recurrent;
            bytes_state += sizeof(float) * (uint64_t) (hparams.n_embd_r() + hparams.n_embd_s());
        }
    }
    // The metadata may promise blocks that were left out of the file, or were not loaded.
    for (uint32_t i = hparams.n_layer(); i < hparams.n_layer_all; ++i) {
        const std::string tensor = "blk." + std::to_string(i) + ".nextn.eh_proj.weight";
        n_layer_mtp += model->get_tensor(tensor.c_str()) != nullptr;
    }
}

void Model::check_usable() const {
    const char * why = nullptr;
    if (llama_vocab_type(vocab()) == LLAMA_VOCAB_TYPE_NONE || n_vocab < 1) {
        why = "it has no vocabulary";
    } else if (llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
        why = "it is no decoder-only model";
    } else if (llama_model_is_diffusion(model)) {
        why = "it is a diffusion model";
    } else if (n_layer < 1) {
        why = "it has no trunk layers";
    } else if (n_layer_recurrent > 0 && n_layer_recurrent < n_layer && !model->get_tensor("blk.0.attn_norm.weight")) {
        why = "it holds MTP blocks only, without the trunk";
    }
    if (why) {
        fail(PYSPEC_ERR_MODEL, "%s (%s): %s", name.c_str(), arch.c_str(), why);
    }
}

void Model::check_token(int32_t token, const char * what) const {
    if (token < 0 || token >= n_vocab) {
        fail(PYSPEC_ERR_ARGUMENT, "%s is token %d; the vocabulary has %d", what, token, n_vocab);
    }
}

void Model::fill(pyspec_info & info) const {
    copy_string(info.arch, sizeof(info.arch), arch);
    copy_string(info.desc, sizeof(info.desc), model->desc());
    info.n_params          = llama_model_n_params(model);
    info.size_bytes        = llama_model_size(model);
    info.n_vocab           = n_vocab;
    info.n_ctx_train       = n_ctx_train;
    info.n_embd            = n_embd;
    info.n_layer           = n_layer;
    info.n_layer_recurrent = n_layer_recurrent;
    info.n_layer_mtp       = n_layer_mtp;
    info.token_bos         = llama_vocab_bos(vocab());
    info.token_eos         = llama_vocab_eos(vocab());
    info.token_eot         = llama_vocab_eot(vocab());
    info.add_bos           = llama_vocab_get_add_bos(vocab());
    info.is_recurrent      = is_recurrent;
    info.is_hybrid         = is_hybrid;
    info.bytes_state       = bytes_state;
}

} // namespace pyspec
