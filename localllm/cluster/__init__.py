"""One model on several processes or machines: its layers are split into stages that run one after the other.

A stage has consecutive layers of the plan (`cut.py`, with the rewrite that also divides a plan between a GPU and the
CPU): their weights, and the cache blocks and recurrent states of their cache layers. The first stage has the
embeddings, n-gram tables included; the last has the output norm, the output and the heads for drafting.

    front: engine, block tables, stage 0 --> stage 1 --> ... --> last stage --> front

Every message travels this ring in order (`ring.py`), so a step, a copy of cache blocks and the next step reach every
stage in the order in which the front sent them. A step carries its batch, with the front's block tables, and the values
that cross the cut. Truncating, forking and releasing a sequence, and going back to an earlier recurrent state, only
change the block tables, which the next step carries; copy-on-write sends a copy. On the CPU, the logits have the bits
of one process.

Several steps may be in flight, so that all stages are busy; the engine collects them in the order of submission. After
a stage is lost (`StageLost`), `SplitExecutable.restore` connects again. The remaining stages keep their weights, and
all caches count as empty. `generation/core.py` then evaluates the tokens of its requests again. A stage's process ends
itself if it hangs (`watchdog.py`).

May import: base, plan, backends, gguf, engine, loading.
Begin with: cut.py (sizing.py chooses where to cut), then stage.py and executable.py; exchange.py assigns answers to
requests, wire.py has the bytes of a message, zeromq.py the connections.
"""
