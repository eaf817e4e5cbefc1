"""llama.cpp options that localllm lacks, each with advice on what to do instead."""

from __future__ import annotations

_ONE_DEVICE = "a model runs on one card; --device chooses it"
_POSITIONS = "the file says how positions are rotated; leave it out"
_ADAPTER = "adapters cannot be loaded"
_LEAVE = "leave it out"

_BY_REASON: dict[str, tuple[str, ...]] = {
    f"attention has one form here; {_LEAVE}": ("-fa", "--flash-attn"),
    "use localllm chat": ("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"),
    "use localllm run, with --raw for plain text": ("-no-cnv", "--no-conversation"),
    "use localllm run": ("-st", "--single-turn"),
    f"prompts are cut into batches that suit the device; {_LEAVE}": ("-b", "--batch-size", "-ub", "--ubatch-size"),
    "-t counts for prompts too": ("-tb", "--threads-batch"),
    f"chat templates always run; {_LEAVE}": ("--jinja",),
    "use --raw for plain text": ("--no-jinja",),
    f"files are read as the device needs them; {_LEAVE}": ("--mmap", "--no-mmap", "--mlock"),
    "write the characters themselves": ("-e", "--escape", "--no-escape"),
    "colours follow the terminal and NO_COLOR": ("-co", "--color"),
    f"the prompt is never printed; {_LEAVE}": ("--display-prompt", "--no-display-prompt"),
    _ONE_DEVICE: ("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"),
    "use -ngl and -ncmoe": ("-ot", "--override-tensor"),
    "use -ncmoe N": ("-cmoe", "--cpu-moe"),
    f"the cache lies where its layers run; {_LEAVE}": ("-nkvo", "--no-kv-offload", "-kvo", "--kv-offload"),
    f"as many layers of the draft as fit go to the card; {_LEAVE}": ("-ngld", "--gpu-layers-draft"),
    "--draft-max limits how much is drafted": ("--draft-min", "--draft-n-min", "--draft-p-min"),
    _POSITIONS: ("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"),
    "--context-shift keeps the system prompt": ("--keep",),
    _ADAPTER: ("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
    "images and sound cannot be read": ("-mm", "--mmproj", "--image", "--audio"),
    f"there is no log to switch off; {_LEAVE}": ("--log-disable",),
    f"a terminal always shows the canvas, a pipe never; {_LEAVE}": ("--diffusion-visual",),
    f"--temp samples from the same distribution; {_LEAVE}": ("--diffusion-add-gumbel-noise",),
}
FOREIGN = {flag: reason for reason, flags in _BY_REASON.items() for flag in flags}
