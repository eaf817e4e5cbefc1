"""The table of commands: their help, their option groups, and the functions that run them.

A new command is a module in `localllm.cli.commands`, an option group, and a row here.
"""

from __future__ import annotations

from localllm.cli import options, tool_options
from localllm.cli.app import Command
from localllm.options import AnswerOptions, DiffusionOptions, SamplingOptions, ServeOptions

_SERVING = (options.ModelName, ServeOptions, options.OpeningOptions, SamplingOptions)
_ANSWERING = (
    options.OpeningOptions,
    AnswerOptions,
    options.FormatOptions,
    options.DisplayOptions,
    options.KeepingOptions,
    SamplingOptions,
)
_EXPLAINING = (options.OpeningOptions, AnswerOptions, options.FormatOptions, options.KeepingOptions, SamplingOptions)

_COMMANDS: dict[str, Command] = {
    "chat": Command(
        "[MODEL]",
        "chat with a model (default: the built-in demo)",
        "Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. From a pipe, every line is one turn.",
        (options.ModelName, options.ChatOptions, *_ANSWERING),
        "starting:chat",
    ),
    "run": Command(
        "MODEL [PROMPT]",
        "answer one prompt on stdout",
        "The prompt is PROMPT, piped input, or both in this order. If the file has a chat template, the prompt is one\n"
        "turn of a chat. If it has none, or with --raw, the model continues the prompt as plain text. A diffusion\n"
        "model fills in the answer step by step; see docs/diffusion.md.",
        (options.RunOptions, *_ANSWERING, DiffusionOptions),
        "starting:run",
        placed=True,
    ),
    "explain": Command(
        "MODEL [PROMPT]",
        "show how an answer is made: tokens, time, bytes, candidates, drafts",
        "Answers like run, with the same tokens for the same seed, and shows what happened. Every number comes from\n"
        "this run. See docs/explain.md.",
        (options.ExplainOptions, *_EXPLAINING),
        "starting:explain",
        placed=True,
    ),
    "embed": Command(
        "MODEL [TEXT...]",
        "print embeddings of texts, or rank documents",
        "A text is a TEXT, or a line of FILE or of piped input. With --query a reranker scores each text.",
        (options.EmbedOptions, options.OpeningOptions),
        "starting:embed",
    ),
    "serve": Command(
        "[MODEL]",
        "answer programs over HTTP",
        "Speaks the APIs of OpenAI, Anthropic, Ollama and llama.cpp. A request's tokens are the same alone and in\n"
        "company. Without MODEL, give --models FOLDER.",
        _SERVING,
        "starting:serve",
    ),
    "web": Command(
        "[MODEL]",
        "chat with a model on a web page (default: the built-in demo)",
        "Runs the same server as localllm serve, and opens its page in the browser.",
        _SERVING,
        "starting:web",
    ),
    "top": Command(
        "[URL]",
        "watch a running localllm serve (default: http://127.0.0.1:8080)",
        "Requests, tokens per second, cache, and percentiles of the time to the first token (TTFT) and between tokens\n"
        "(ITL), estimated from the buckets of GET /metrics. Leave with q or Ctrl-C.",
        (options.TopOptions,),
        "top.command:top",
    ),
    "pull": Command(
        "USER/REPO[:QUANT]",
        "fetch a model from the Hugging Face hub",
        "QUANT is a quantization (Q4_K_M), the beginning of one, or a file's name. Without QUANT, the largest usual\n"
        "type that fits the free memory. An interrupted pull continues. HF_TOKEN, HF_ENDPOINT and HF_HOME are heeded.",
        (options.PullOptions,),
        "commands.pull:pull",
    ),
    "search": Command(
        "WORDS",
        "find models on the Hugging Face hub",
        "Lists repositories with GGUF files whose names contain all words, the most downloaded first.",
        (options.SearchOptions,),
        "commands.search:search",
    ),
    "list": Command(
        "",
        "list the models on this computer",
        "Those that were pulled, and those of llama.cpp, Ollama and LM Studio. Each name can be given as MODEL.",
        (options.ListModelsOptions,),
        "commands.list:list_models",
    ),
    "rm": Command(
        "NAME",
        "delete a model that pull has fetched",
        "Files of other programs are never deleted.",
        (options.RemoveOptions,),
        "commands.rm:remove",
    ),
    "show": Command(
        "MODEL",
        "show what is in a model file and what memory it needs",
        "",
        (options.ModelName, options.ShowOptions),
        "starting:show",
    ),
    "bench": Command(
        "MODEL...",
        "measure speed, as llama-bench does",
        "GB/s: bytes that decoding reads. % of roof: share of the read bandwidth. GOP/s: operations of a prompt.\n"
        "p50, p90, p99 ms: time from one decoded token to the next. load s: opening the model. peak: most memory used.",
        (options.ModelNames, tool_options.BenchOptions),
        "starting:bench",
    ),
    "devices": Command(
        "",
        "list the devices that can run models",
        "Shows the memory and the copy speed of each device. If a kind of device is missing, stderr says why.",
        (options.DevicesOptions,),
        "commands.devices:devices",
    ),
    "doctor": Command(
        "",
        "show what a bug report needs to know about this computer",
        "Versions, processor, kernels, memory, speed, devices and caches, to paste into a report. Takes some seconds.\n"
        "With --gpu: whether every kernel computes on each device what the NumPy reference computes.",
        (options.DoctorOptions,),
        "commands.doctor:doctor",
    ),
    "perplexity": Command(
        "MODEL",
        "measure how well a model predicts a text",
        "Uses llama.cpp's definition: independent windows, each scored over its second half.",
        (options.ModelName, tool_options.PerplexityOptions, options.MeasuringOptions),
        "starting:perplexity",
    ),
    "imatrix": Command(
        "MODEL",
        "measure which weights matter on a text, for quantize --imatrix",
        "Averages the squared inputs of every matrix over the text. llama.cpp can read the file.",
        (options.ModelName, tool_options.ImatrixOptions, options.MeasuringOptions),
        "starting:imatrix",
    ),
    "quantize": Command(
        "IN [OUT] TYPE",
        "make a smaller model file",
        "IN is a GGUF file or a Hugging Face folder. TYPE is a llama-quantize name or number, such as Q4_K_M,\n"
        "and chooses the same formats; COPY changes none. Without OUT, it is written beside IN. --fit or --max-kld\n"
        "replace TYPE.",
        (tool_options.QuantizeOptions,),
        "commands.quantize:quantize",
    ),
}


_CONFIG = Command(
    "[COMMAND|path|check|set KEY VALUE|unset KEY]",
    "show or change the configuration: the default model and every option",
    "Flags come first, then variables LOCALLLM_NAME, a preset, the configuration file, a model file's recommendation,\n"
    "defaults. `config set model NAME` chooses the default model, which commands without MODEL use.",
    (options.ConfigOptions,),
    "commands.config:config",
)
COMMANDS = {
    name: command._replace(groups=(*command.groups, options.ConfigurationOptions))
    for name, command in _COMMANDS.items()
} | {"config": _CONFIG}
