// A llama_model and what pyspec needs to know about it.
#pragma once

#include "pyspec.h"

#include "llama.h"

#include <cstdint>
#include <memory>
#include <string>

namespace pyspec {

// Fails with PYSPEC_ERR_MODEL unless the path is a readable GGUF file.
void check_gguf(const char * path);

bool has_tensor(const llama_model * model, const char * name);

class Model {
public:
    using Progress = bool (*)(float, void *);

    static std::shared_ptr<Model> load(const char * path, const pyspec_engine_params & params, Progress progress,
                                       void * user);
    // One of ours is shared with whoever holds it; any other stays the caller's.
    static std::shared_ptr<Model> attach(llama_model * model);

    ~Model();
    Model(const Model &)             = delete;
    Model & operator=(const Model &) = delete;

    llama_model *       get() const { return model; }
    const llama_vocab * vocab() const { return llama_model_get_vocab(model); }

    // Facts, read once.
    std::string arch;
    std::string name;                // how messages call it: the file's name, or its architecture
    int32_t     n_vocab       = 0;
    int32_t     n_embd        = 0;   // width of the hidden state that MTP reads
    int32_t     n_ctx_train   = 0;
    int32_t     n_layer       = 0;   // trunk
    int32_t     n_layer_mtp   = 0;   // MTP blocks whose tensors are loaded
    int32_t     n_layer_recurrent = 0;
    uint64_t    bytes_state   = 0;   // recurrent state of one sequence
    bool        is_hybrid     = false;
    bool        is_recurrent  = false;

    void check_token(int32_t token, const char * what) const; // PYSPEC_ERR_ARGUMENT when it is none
    void fill(pyspec_info & info) const;

private:
    Model(llama_model * model, bool owned, std::string name);
    void read_facts(); // the one place that looks into llama.cpp's private headers
    void check_usable() const;

    llama_model * model;
    bool          owned;
};

} // namespace pyspec
