"""Which service owns which setting of `trivet serve`: the one table, readable from top to bottom.

A setting that was given becomes the flag of its owner. One that was not given is left to the owner: its table in the configuration file,
its environment variables, its default.
"""

from collections.abc import Mapping

SCHEDULER = "scheduler"
WORKER = "worker"
FRONTEND = "frontend"
EVERY_SERVICE = (SCHEDULER, WORKER, FRONTEND)

OWNERS: Mapping[str, tuple[str, ...]] = {
    # setting                  services that take it as a flag of the same name
    "model": (WORKER,),
    "dtype": (WORKER,),
    "kv_dtype": (WORKER,),
    "load_format": (WORKER,),
    "max_model_len": (WORKER,),
    "block_size": (WORKER,),
    "num_kv_blocks": (WORKER,),
    "kv_cache_memory": (WORKER,),
    "max_num_seqs": (WORKER,),
    "max_num_batched_tokens": (WORKER,),
    "threads": (WORKER,),
    "quantization": (WORKER,),
    "attention_backend": (WORKER,),
    "batch_invariant": (WORKER,),
    "logits_processors": (WORKER,),
    "enable_prefix_caching": (SCHEDULER,),
    "policy": (SCHEDULER,),
    "step_timeout": (SCHEDULER,),
    "replica_timeout": (SCHEDULER,),
    "host": (FRONTEND,),
    "port": (FRONTEND,),
    "uds": (FRONTEND,),
    "grpc_listen": (FRONTEND,),
    "api_key": (FRONTEND,),
    "insecure": (FRONTEND,),
    "root_path": (FRONTEND,),
    "served_model_name": (FRONTEND,),
    "chat_template": (FRONTEND,),
    "generation_config": (FRONTEND,),
    "handover_timeout": (FRONTEND,),
    "drain_timeout": EVERY_SERVICE,
    "log_level": EVERY_SERVICE,
    "log_format": EVERY_SERVICE,
}

LAUNCHER_OWN = frozenset({"workers", "max_restarts", "startup_timeout"})
"""Settings that no service sees."""
