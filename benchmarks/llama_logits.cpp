// llama.cpp's logits or ids of a GGUF file; benchmarks/llama_logits.py builds it against a llama.cpp tree.
//   logits MODEL OUT ids ID...              float32 (ids, vocabulary), F32 cache, no flash attention
//   logits MODEL OUT cache TYPE CTX FILE    the same for windows of CTX ids (int32) of FILE, with a cache of this type
//   logits MODEL OUT text FILE              int32, with the special tokens that the file adds
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static void errors_only(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

int main(int argc, char ** argv) {
    if (argc < 5) return 64;
    llama_log_set(errors_only, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    const llama_vocab * vocab = llama_model_get_vocab(model);
    FILE * out = fopen(argv[2], "wb");
    if (std::string(argv[3]) == "text") {
        std::string text;
        FILE * in = fopen(argv[4], "rb");
        for (int c; (c = fgetc(in)) != EOF;) text += char(c);
        std::vector<llama_token> ids(4 * text.size() + 16);
        int n = llama_tokenize(vocab, text.data(), text.size(), ids.data(), ids.size(), true, false);
        fwrite(ids.data(), 4, n, out);
        return fclose(out);
    }
    std::vector<int> ids;
    int n = argc - 4;
    ggml_type type = GGML_TYPE_F32;
    if (std::string(argv[3]) == "cache") {
        if (argc < 7) return 64;
        for (int t = 0; t < GGML_TYPE_COUNT; t++) {
            const char * name = ggml_type_name((ggml_type) t);
            if (name && !strcmp(name, argv[4])) type = (ggml_type) t;
        }
        n = atoi(argv[5]);
        FILE * in = fopen(argv[6], "rb");
        for (int id; fread(&id, 4, 1, in) == 1;) ids.push_back(id);
    } else {
        for (int i = 0; i < n; i++) ids.push_back(atoi(argv[4 + i]));
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = n > 256 ? n : 256;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = type;
    // a quantized cache needs flash attention, which would round the values of other caches to halves
    params.flash_attn_type = ggml_is_quantized(type) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 2;
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (size_t first = 0; first + n <= ids.size(); first += n) {
        llama_memory_clear(llama_get_memory(context), true);
        for (int i = 0; i < n; i++) {
            batch.token[i] = ids[first + i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch)) return 3;
        for (int i = 0; i < n; i++) fwrite(llama_get_logits_ith(context, i), 4, llama_vocab_n_tokens(vocab), out);
    }
    return fclose(out);
}
