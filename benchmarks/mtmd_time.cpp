// Times llama.cpp's encoders of pictures, for benchmarks/encoders.py, which compiles this file.
//
//   mtmd_time MMPROJ.gguf TEXT.gguf THREADS FLASH
//
// Reads lines "WIDTH HEIGHT FILE" (raw RGB bytes) and answers each with a line: tokens, seconds of preprocessing and of
// encoding, and the largest resident size in KiB.
#include "llama.h"
#include "mtmd.h"

#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void quiet(enum ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_ERROR) { fputs(text, stderr); }
}

int main(int argc, char ** argv) {
    if (argc != 5) { return 2; }
    llama_log_set(quiet, nullptr);
    mtmd_log_set(quiet, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    auto given = llama_model_default_params();
    given.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(argv[2], given);
    auto wanted = mtmd_context_params_default();
    wanted.use_gpu = false;
    wanted.print_timings = false;
    wanted.warmup = false;
    wanted.n_threads = atoi(argv[3]);
    wanted.flash_attn_type = atoi(argv[4]) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    mtmd_context * context = model ? mtmd_init_from_file(argv[1], model, wanted) : nullptr;
    if (!context) { return 1; }
    int width, height;
    std::string path;
    while (std::cin >> width >> height >> path) {
        std::ifstream file(path, std::ios::binary);
        std::vector<unsigned char> pixels((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        double began = now();
        mtmd_bitmap * bitmap = mtmd_bitmap_init(width, height, pixels.data());
        const std::string prompt = mtmd_default_marker();
        mtmd_input_text text{prompt.c_str(), prompt.size(), true, true};
        mtmd_input_chunks * chunks = mtmd_input_chunks_init();
        const mtmd_bitmap * bitmaps[] = {bitmap};
        if (mtmd_tokenize(context, chunks, &text, bitmaps, 1)) { return 1; }
        double prepared = now();
        size_t tokens = 0;
        for (size_t i = 0; i < mtmd_input_chunks_size(chunks); i++) {
            const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks, i);
            if (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_TEXT) { continue; }
            if (mtmd_encode_chunk(context, chunk)) { return 1; }
            tokens += mtmd_input_chunk_get_n_tokens(chunk);
        }
        double done = now();
        struct rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        printf("%zu %.6f %.6f %ld\n", tokens, prepared - began, done - prepared, usage.ru_maxrss);
        fflush(stdout);
        mtmd_input_chunks_free(chunks);
        mtmd_bitmap_free(bitmap);
    }
    return 0;
}
