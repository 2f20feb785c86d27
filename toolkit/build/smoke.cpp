// smoke MODEL LOGITS: decodes a fixed list of tokens and writes the logits of each step, raw float32.
//
// Compiled against the llama.h of the llama.cpp under test, so a difference between versions is found by the
// compiler. Runs with a stock and with a patched build: the payload is looked up by name when it runs.
// Prints one JSON object: the modes of the payload (null: a stock build), the one in use, its counters.

#include "llama.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

static const int N_PROMPT  = 16; // tokens in one batch
static const int N_DECODE  = 24; // then one at a time
static const int N_THREADS = 2;

// one of each pair is in every llama.h; the int argument prefers the first of the pair

template <typename P> static auto load_mapped(P & params, int) -> decltype(params.load_mode, void()) {
    params.load_mode = (decltype(params.load_mode)) 1; // LLAMA_LOAD_MODE_MMAP
}
template <typename P> static auto load_mapped(P & params, long) -> decltype(params.use_mmap, void()) {
    params.use_mmap  = true;
    params.use_mlock = false;
}

// it takes precedence over the mapping
template <typename P> static auto without_direct_io(P & params, int) -> decltype(params.use_direct_io, void()) {
    params.use_direct_io = false;
}
template <typename P> static void without_direct_io(P &, long) {
}

template <typename P> static auto without_flash_attention(P & params, int) -> decltype(params.flash_attn_type, void()) {
    params.flash_attn_type = (decltype(params.flash_attn_type)) 0; // LLAMA_FLASH_ATTN_TYPE_DISABLED
}
template <typename P> static auto without_flash_attention(P & params, long) -> decltype(params.flash_attn, void()) {
    params.flash_attn = false;
}

// repacking would copy the experts out of the mapping
template <typename P> static auto without_repacking(P & params, int) -> decltype(params.use_extra_bufts, void()) {
    params.use_extra_bufts = false;
}
template <typename P> static void without_repacking(P &, long) {
}

template <typename F> static F find(const char * name) {
    return (F) dlsym(RTLD_DEFAULT, name);
}

static void print_payload(void) {
    auto mode_name     = find<const char * (*)(int)>("ggml_moe_prefetch_mode_name");
    auto get_mode      = find<int (*)(void)>("ggml_moe_prefetch_get_mode");
    auto counter_count = find<int (*)(void)>("ggml_moe_prefetch_counter_count");
    auto counter_name  = find<const char * (*)(int)>("ggml_moe_prefetch_counter_name");
    auto counter_value = find<uint64_t (*)(int)>("ggml_moe_prefetch_counter_value");
    if (!mode_name || !get_mode || !counter_count || !counter_name || !counter_value) {
        printf("{\"modes\": null}\n");
        return;
    }
    printf("{\"modes\": [");
    for (int i = 0; mode_name(i); i++) {
        printf("%s\"%s\"", i ? ", " : "", mode_name(i));
    }
    printf("], \"mode\": \"%s\", \"counters\": {", mode_name(get_mode()));
    for (int i = 0; i < counter_count(); i++) {
        printf("%s\"%s\": %llu", i ? ", " : "", counter_name(i), (unsigned long long) counter_value(i));
    }
    printf("}}\n");
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL LOGITS\n", argv[0]);
        return 2;
    }

    llama_backend_init();

    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    load_mapped(model_params, 0);
    without_direct_io(model_params, 0);
    without_repacking(model_params, 0);

    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        fprintf(stderr, "cannot load %s\n", argv[1]);
        return 1;
    }

    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx           = 256;
    context_params.n_batch         = N_PROMPT;
    context_params.n_ubatch        = N_PROMPT;
    context_params.n_threads       = N_THREADS;
    context_params.n_threads_batch = N_THREADS;
    without_flash_attention(context_params, 0);

    llama_context * context = llama_init_from_model(model, context_params);
    FILE          * out     = fopen(argv[2], "wb");
    if (!context || !out) {
        fprintf(stderr, "cannot make a context, or write %s\n", argv[2]);
        return 1;
    }

    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    std::vector<llama_token> tokens(N_PROMPT + N_DECODE);
    for (int i = 0; i < (int) tokens.size(); i++) {
        tokens[i] = (1 + i*37) % n_vocab;
    }

    for (int done = 0; done < (int) tokens.size(); ) {
        const int n = done == 0 ? N_PROMPT : 1;
        if (llama_decode(context, llama_batch_get_one(tokens.data() + done, n)) != 0) {
            fprintf(stderr, "llama_decode failed at token %d\n", done);
            return 1;
        }
        done += n;

        const float * logits = llama_get_logits_ith(context, -1);
        for (int i = 0; i < n_vocab; i++) {
            if (!std::isfinite(logits[i])) {
                fprintf(stderr, "logit %d after token %d is not a number\n", i, done);
                return 1;
            }
        }
        if (fwrite(logits, sizeof(float), n_vocab, out) != (size_t) n_vocab) {
            fprintf(stderr, "cannot write %s\n", argv[2]);
            return 1;
        }
    }
    if (fclose(out) != 0) {
        return 1;
    }

    print_payload();

    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
