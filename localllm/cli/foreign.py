"""llama.cpp options that localllm lacks: those that change nothing here are ignored, and the others get advice."""

from __future__ import annotations

_ONE_DEVICE = "a model runs on one card; --device chooses it"
_POSITIONS = "the file defines the RoPE parameters; leave it out"
_ADAPTER = "adapters are not supported"
_LEAVE = "leave it out"

_BY_REASON: dict[str, tuple[str, ...]] = {
    "use localllm chat": ("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"),
    "use localllm run, with --raw for plain text": ("-no-cnv", "--no-conversation"),
    "use localllm run": ("-st", "--single-turn"),
    "use --raw for plain text": ("--no-jinja",),
    "write the characters themselves": ("-e", "--escape", "--no-escape"),
    f"the prompt is never printed; {_LEAVE}": ("--display-prompt",),
    _ONE_DEVICE: ("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"),
    "use -ngl and -ncmoe": ("-ot", "--override-tensor"),
    "use -ncmoe N": ("-cmoe", "--cpu-moe"),
    "--draft-max limits how much is drafted": ("--draft-min", "--draft-n-min", "--draft-p-min"),
    _POSITIONS: ("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"),
    "--context-shift keeps the system prompt": ("--keep",),
    _ADAPTER: ("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
    "--mmproj off loads no encoders": ("--no-mmproj",),
    "the encoders run where the model runs": ("--mmproj-offload", "--no-mmproj-offload"),
    "--mmproj names a file; pull the model with -hf, or give a path": ("-mmu", "--mmproj-url", "--mmproj-auto"),
    f"--temp samples from the same distribution; {_LEAVE}": ("--diffusion-add-gumbel-noise",),
}
# Options that change no answer here, and the values that may follow each; commands from model cards have them.
# None: any value, which must follow.
HARMLESS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("-fa", "--flash-attn", "-co", "--color"), ("on", "off", "auto", "1", "0")),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size", "-tb", "--threads-batch")),
    **dict.fromkeys(("-ngld", "--gpu-layers-draft")),
    **dict.fromkeys(("--jinja", "--mmap", "--no-mmap", "--mlock", "--no-display-prompt", "--log-disable"), ()),
    **dict.fromkeys(("-nkvo", "--no-kv-offload", "-kvo", "--kv-offload", "--diffusion-visual"), ()),
}
FOREIGN = {flag: reason for reason, flags in _BY_REASON.items() for flag in flags}
