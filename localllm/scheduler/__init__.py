"""Many requests on one engine: continuous batching, a prefix cache, preemption, the same tokens in any company."""
