// llama.cpp's logits or ids of a GGUF file, for benchmarks/convert.py: built there against a llama.cpp tree.
//   logits MODEL OUT ids ID...     float32 (ids, vocabulary), F32 cache, no flash attention
//   logits MODEL OUT text FILE     int32, with what the file puts around a text
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static void errors_only(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
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
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 2;
    int n = argc - 4;
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = atoi(argv[4 + i]);
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 3;
    for (int i = 0; i < n; i++) fwrite(llama_get_logits_ith(context, i), 4, llama_vocab_n_tokens(vocab), out);
    return fclose(out);
}
