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
        "chat with a model (default: the bundled demo)",
        "Ctrl-C stops an answer, Ctrl-D quits, and /help lists the commands. From a pipe, every line is one turn.",
        (options.ModelName, options.ChatOptions, *_ANSWERING),
        "starting:chat",
    ),
    "run": Command(
        "MODEL [PROMPT]",
        "answer one prompt on stdout",
        "The prompt is PROMPT, piped input, or both in this order. If the model has a chat template, the prompt is\n"
        "one turn of a chat. Otherwise, or with --raw, the model continues it as plain text. A diffusion model fills\n"
        "in the answer step by step; see docs/diffusion.md.",
        (options.RunOptions, *_ANSWERING, DiffusionOptions),
        "starting:run",
        placed=True,
    ),
    "explain": Command(
        "MODEL [PROMPT]",
        "show how an answer is generated: tokens, time, bytes, candidates, drafts",
        "Answers like run, with the same tokens for the same seed, and then explains the answer. Every number is\n"
        "measured in this run. See docs/explain.md.",
        (options.ExplainOptions, *_EXPLAINING),
        "starting:explain",
        placed=True,
    ),
    "embed": Command(
        "MODEL [TEXT...]",
        "print embeddings of texts, or rank documents",
        "Each TEXT, or each line of FILE or of piped input, is one text. With --query, a reranker scores the texts.",
        (options.EmbedOptions, options.OpeningOptions),
        "starting:embed",
    ),
    "serve": Command(
        "[MODEL]",
        "serve models to other programs over HTTP",
        "Supports the APIs of OpenAI, Anthropic, Ollama and llama.cpp. A request gives identical tokens whether it\n"
        "runs alone or alongside others. Without MODEL, offers every model that localllm list shows, loaded on demand.",
        _SERVING,
        "starting:serve",
    ),
    "web": Command(
        "[MODEL]",
        "chat with the models on this computer on a web page",
        "Starts the same server as localllm serve and opens its page in the browser.",
        _SERVING,
        "starting:web",
    ),
    "top": Command(
        "[URL]",
        "monitor a running localllm serve (default: http://127.0.0.1:8080)",
        "Shows requests, tokens per second, cache use, and percentiles of the time to first token (TTFT) and between\n"
        "tokens (ITL), estimated from the buckets of GET /metrics. Press q or Ctrl-C to quit.",
        (options.TopOptions,),
        "top.command:top",
    ),
    "worker": Command(
        "",
        "lend this computer to a model that runs on several (--ray)",
        "Starts a cluster of Ray here, or joins one, until Ctrl-C, and prints what to type on the other computers.\n"
        "The token lets anyone run any program on all of them as you. See docs/machines.md.",
        (options.WorkerOptions,),
        "commands.worker:worker",
    ),
    "pull": Command(
        "USER/REPO[:QUANT]",
        "download a model from the Hugging Face hub",
        "QUANT is a quantization (Q4_K_M) or a prefix of one, or a file name. The default is the largest usual type\n"
        "that fits in free memory. Without a name, a terminal shows a model that suits this computer.\n"
        "Interrupted downloads resume. Respects HF_TOKEN, HF_ENDPOINT and HF_HOME.",
        (options.PullOptions,),
        "starting:pull",
    ),
    "search": Command(
        "WORDS",
        "find models on the Hugging Face hub",
        "Lists repositories with GGUF files whose names contain all words, most downloaded first.",
        (options.SearchOptions,),
        "commands.search:search",
    ),
    "list": Command(
        "",
        "list the models on this computer",
        "Includes models downloaded by pull and by llama.cpp, Ollama and LM Studio. Any listed name works as MODEL.",
        (options.ListModelsOptions,),
        "commands.list:list_models",
    ),
    "rm": Command(
        "NAME",
        "delete a model that was downloaded by pull",
        "Files of other programs are never deleted.",
        (options.RemoveOptions,),
        "commands.rm:remove",
    ),
    "show": Command(
        "MODEL",
        "show a model's properties and memory requirements",
        "",
        (options.ModelName, options.ShowOptions),
        "starting:show",
    ),
    "bench": Command(
        "MODEL...",
        "measure speed, like llama-bench",
        "GB/s: bytes that decoding reads. % of roof: share of the read bandwidth. GOP/s: operations of a prompt.\n"
        "p50, p90, p99 ms: time between decoded tokens. load s: time to load the model. peak: highest memory use.",
        (options.ModelNames, tool_options.BenchOptions),
        "starting:bench",
    ),
    "devices": Command(
        "",
        "list the devices that can run models",
        "Shows the memory and copy speed of each device. If a kind of device is missing, the reason is on stderr.",
        (options.DevicesOptions,),
        "commands.devices:devices",
    ),
    "doctor": Command(
        "",
        "show details of this computer for a bug report",
        "Shows versions, processor, kernels, memory, speed, devices and caches. Takes a few seconds. With --gpu,\n"
        "compares every kernel on each device with the NumPy reference.",
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
        "measure which weights matter most, for quantize --imatrix",
        "Averages the squared inputs of every matrix over a text. llama.cpp can read the file.",
        (options.ModelName, tool_options.ImatrixOptions, options.MeasuringOptions),
        "starting:imatrix",
    ),
    "cluster": Command(
        "plan MODEL",
        "forecast a model on several machines",
        "Splits the layers over the machines of --nodes by memory and bandwidth, and shows memory and speed for each\n"
        "number of stages. This computer is measured for it; the machines need not exist.",
        (tool_options.ClusterOptions,),
        "commands.cluster:cluster",
    ),
    "quantize": Command(
        "IN [OUT] TYPE",
        "make a smaller model file",
        "IN is a GGUF file or a Hugging Face folder. TYPE is a llama-quantize name or number, such as Q4_K_M,\n"
        "with the same formats; COPY keeps all formats. Without OUT, the file is written to IN's folder. --fit or\n"
        "--max-kld can replace TYPE.",
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
