"""What settings are called elsewhere: in transformers, Megatron-LM, torchtitan, DeepSpeed, Lightning and nanoGPT;
and what to set in the place of settings and values of earlier versions."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "run.steps": "max_steps train_iters max_iters num_steps train_steps training_steps total_steps num_training_steps "
    "iterations",
    "run.tokens": "max_tokens train_tokens total_tokens num_tokens",
    "run.hours": "max_hours max_time",
    "run.dir": "output_dir save_dir out_dir default_root_dir dump_folder log_dir",
    "run.name": "run_name experiment_name exp_name",
    "run.seed": "random_seed data_seed",
    "run.deterministic": "full_determinism deterministic_mode",
    "lr.peak": "learning_rate lr max_lr base_lr",
    "lr.warmup": "warmup_steps warmup_iters num_warmup_steps lr_warmup_iters lr_warmup_steps",
    "lr.final": "min_lr min_lr_ratio min_lr_factor min_decay_lr",
    "lr.schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "lr.decay": "lr_decay_iters decay_steps",
    "batch.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size context_length ctx_len",
    "batch.global_size": "batch_size global_batch_size train_batch_size",
    "batch.micro_size": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size "
    "device_batch_size mbs",
    "batch.accumulation": "gradient_accumulation_steps grad_accum grad_accumulation accumulate_grad_batches "
    "batch_accumulation_per_replica",
    "optimizer.name": "optim",
    "optimizer.beta1": "adam_beta1 momentum",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.clip_norm": "max_grad_norm clip_grad grad_clip gradient_clip_val gradient_clipping max_norm",
    "model.width": "hidden_size d_model n_embd dim embedding_size",
    "model.depth": "num_layers n_layers n_layer num_hidden_layers",
    "model.attention.heads": "num_heads n_heads n_head num_attention_heads",
    "model.attention.kv_heads": "num_key_value_heads n_kv_heads num_query_groups num_kv_heads",
    "model.attention.kind": "multi_latent_attention mla",
    "model.attention.latent.q_rank": "q_lora_rank",
    "model.attention.latent.kv_rank": "kv_lora_rank",
    "model.attention.latent.nope_dim": "qk_nope_head_dim qk_head_dim",
    "model.attention.latent.rope_dim": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.attention.latent.value_dim": "v_head_dim",
    "model.feed_forward.width": "ffn_hidden_size intermediate_size mlp_dim d_ff",
    "parallel.ep": "expert_parallel expert_parallel_degree expert_parallel_size expert_model_parallel_size",
    "parallel.ep_dispatch": "moe_token_dispatcher_type expert_parallel_comm_backend overlap_moe_expert_parallel_comm",
    "model.feed_forward.experts.count": "moe experts num_experts num_local_experts n_routed_experts",
    "model.feed_forward.experts.top_k": "num_experts_per_tok moe_router_topk",
    "model.feed_forward.experts.bias_rate": "moe_router_bias_update_rate load_balance_coeff",
    "model.feed_forward.experts.bias_rule": "quantile_balancing",
    "model.feed_forward.experts.balance": "aux_loss moe_aux_loss_coeff router_aux_loss_coef load_balancing_loss",
    "model.feed_forward.experts.balance_over": "moe_router_load_balancing_type",
    "model.feed_forward.experts.z_loss": "moe_z_loss_coeff router_z_loss_coef",
    "model.max_length": "max_position_embeddings",
    "model.attention.window": "window_size sliding_window",
    "model.attention.sinks": "attention_sinks softmax_type",
    "model.attention.rope.theta": "rope_theta rotary_base",
    "model.adapter.rank": "lora lora_rank lora_r lora_dim peft qlora",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.scale": "use_rslora rslora",
    "model.adapter.targets": "target_modules lora_target_modules lora_target lora_attn_modules",
    "model.adapter.trained": "modules_to_save",
    "model.adapter.weights": "quantize_base load_in_8bit base_weight_dtype",
    "model.init.std": "init_method_std initializer_range",
    "model.tied": "tie_word_embeddings tie_embeddings",
    "parallel.tp": "tensor_parallel tensor_model_parallel_size tensor_parallel_degree tp_size",
    "parallel.pp": "pipeline_parallel pipeline_model_parallel_size pipeline_parallel_degree pp_size",
    "parallel.cp": "context_parallel context_parallel_size sequence_parallel_size ulysses_size ulysses_degree",
    "parallel.dp": "data_parallel data_parallel_size dp_size",
    "parallel.shard": "data_parallel_shard_degree",
    "parallel.tp_overlap": "fusion tp_comm_overlap async_tensor_parallel enable_async_tensor_parallel",
    "parallel.zero.collectives": "transport",
    "parallel.zero.stage": "zero_stage zero_optimization fsdp",
    "activation.mode": "gradient_checkpointing activation_checkpointing activation_checkpoint recompute "
    "recompute_granularity",
    "precision.compute": "bf16 fp16 dtype torch_dtype mixed_precision",
    "precision.matmul": "tf32",
    "precision.reduce": "communication_data_type grad_reduce_in_bf16 mixed_precision_reduce",
    "precision.loss_scale": "initial_loss_scale",
    "precision.float8.recipe": "fp8 float8 fp8_recipe float8_recipe_name fp8_format",
    "compile": "torch_compile",
    "optimizer.ema.decay": "ema_decay ema_beta use_ema ema",
    "checkpoint.every": "save_steps save_interval save_every save_freq checkpoint_interval",
    "checkpoint.keep_every": "save_retain_interval",
    "checkpoint.asynchronous": "async_save async_mode",
    "checkpoint.keep_last": "save_total_limit keep_latest_k save_top_k",
    "checkpoint.resume": "resume_from_checkpoint resume_from load_from resume ckpt_path",
    "eval.every": "eval_steps eval_interval eval_every val_check_interval eval_freq",
    "eval.sequences": "eval_iters limit_val_batches",
    "logging.every": "logging_steps log_interval log_every log_freq log_every_n_steps",
    "logging.wandb.project": "wandb_project",
    "logging.wandb.enabled": "use_wandb report_to",
    "logging.profile": "profile profiler profiling",
    "data.sources": "dataset datasets dataset_path train_file train_files data_path train_data",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_type",
    "data.workers": "num_workers dataloader_num_workers",
    "model.code": "model_impl force_hf",
    "model.from_hf": "model_name_or_path pretrained_model_name_or_path hf_path init_from",
}

SETTINGS = {name: setting for setting, names in _NAMES.items() for name in names.split()}
"""Name elsewhere -> setting here."""

_LENGTH = "a run's length is run.steps or run.tokens, and the metric epoch counts passes"
ABSENT = {
    **dict.fromkeys(("epochs", "epoch", "num_epochs", "max_epochs", "num_train_epochs"), _LENGTH),
    "lora_dropout": "adapters have no dropout",
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout"), "there is no dropout"),
    **dict.fromkeys(("early_stopping", "patience"), "a callback can end a run: docs/extending.md has one"),
    "rampup_batch_size": "the global batch is the same in every step",
    **dict.fromkeys(
        ("launcher", "slurm"),
        "trials are processes of this machine; on Slurm a job array trains a list of runs: docs/cluster.md",
    ),
    **dict.fromkeys(
        ("gpus", "processes", "nproc_per_node"),
        "the number of processes is sweep.processes in trainer sweep and tune, and processes in other commands",
    ),
    "label_smoothing_factor": "there is no label smoothing",
}
"""Name elsewhere -> what is true here, where there is no such setting."""

RENAMED_METHODS = {"gather": "allgather", "heads": "ulysses", "both": "hybrid"}
"""Values of `parallel.context.method` in earlier versions -> those of today."""
_CODEC = "set codec=int8 for a slow network, or codec=none"
_SHOW = "it was removed; leave it out and set logging.show"
REMOVED = {
    "precision.scale_growth": "it was removed: the loss scale doubles; leave it out",
    "precision.scale_backoff": "it was removed: the loss scale halves; leave it out",
    "precision.growth_interval": "it was removed: the loss scale doubles after 2,000 good steps; leave it out",
    "parallel.zero.sum_on_host": "it was removed: gradients are added up on the device; leave it out",
    "parallel.pipeline.group_size": "it was removed: parallel.pp micro-batches pass a stage at a time; leave it out",
    "optimizer.muon.momentum": "it was removed: the momentum decays by 0.95; leave it out",
    "optimizer.muon.adjust_lr": "it was removed: steps are as large as AdamW's; leave it out",
    "checkpoint.verify": "it was removed: checksums are always compared; leave it out",
    "parallel.pipeline.probe_steps": "it was removed: three steps are measured; leave it out",
    "logging.wandb.entity": "it was removed; leave it out and set the environment variable WANDB_ENTITY",
    "logging.wandb.tags": "it was removed; leave it out and set the environment variable WANDB_TAGS",
    "logging.types": f"{_SHOW}=[types]",
    "logging.model": f"{_SHOW}=[model]",
    "guard.straggler_factor": "it was removed, guard.slow_factor is for ranks too; leave it out",
    "guard.straggler_lines": "it was removed, guard.slow_lines is for ranks too; leave it out",
    "optimizer.muon.nesterov": "it was removed: the momentum is Nesterov's; leave it out",
    "optimizer.muon.steps": "it was removed: the iteration has five steps; leave it out",
    **dict.fromkeys(
        (f"eval.generate.{name}" for name in ("top_k", "top_p", "stop", "seed", "temperature")),
        "it was removed: `trainer sample` has it; leave it out",
    ),
    "activation.every": "it was removed; leave it out and name the layers that recompute nothing, as "
    "activation.mode=selective activation.save=[all@1-31/2] does",
    **{
        f"parallel.context.method={old}": f"was removed; its name is parallel.context.method={new} now"
        for old, new in RENAMED_METHODS.items()
    },
    "parallel.context.method=halo": "was removed; set method=auto, which gathers the keys of windows too",
    "parallel.context.order=contiguous": "was removed; set order=auto",
    "parallel.context.block": "it was removed: blocks are of 128 tokens; leave it out",
    "parallel.context.inner": "it was removed: the most neighbours of a node exchange heads; leave it out",
    "parallel.context.groups": "it was removed: keys are gathered in up to four groups of heads; leave it out",
    "activation.modules": "it was removed; leave it out and name what is kept, as activation.mode=selective "
    "'activation.save=[attention,attention.*]' does, which recomputes feed-forward blocks",
    "activation.budget": "it was removed; leave it out and set activation=auto",
    "activation.mode=budget": "was removed; set mode=auto",
    "parallel.fusion_chunks": "it was removed with parallel.fusion=chunks; leave it out",
    "parallel.fusion_looks": "it was removed, and the watchdog says what a rank waits for; leave it out",
    **{
        f"parallel.grad_comm.{hop}.{name}": "it was removed: rows are rounded to nearest, with a scale for each 256 "
        "elements in int8 and 128 in int4; leave it out"
        for hop in ("inner", "outer")
        for name in ("block", "hadamard", "stochastic")
    },
    **{
        f"parallel.grad_comm.{hop}.codec={codec}": f"was removed; {_CODEC}"
        for hop in ("inner", "outer")
        for codec in ("auto", "bf16", "fp8")
    },
    **{
        f"parallel.grad_comm.{hop}.error_feedback=average8": "was removed; set error_feedback=classic"
        for hop in ("inner", "outer")
    },
}
"""Settings of earlier versions, and values as SETTING=VALUE -> what became of them, and what to set instead."""


def find_synonym(path: str) -> str | None:
    """What a setting of this path is called here, or that there is none; None for a name that nobody uses."""
    if path in REMOVED:
        return REMOVED[path]
    name = path.lower().replace("-", "_").rpartition(".")[2]
    if name in ABSENT:
        return ABSENT[name]
    return f"here it is '{SETTINGS[name]}'" if SETTINGS.get(name, path) != path else None


def rename_old_settings(values: dict[str, Any]) -> None:
    """Renames settings and values in the config.yaml of a run of an earlier version, in place."""
    parallel = values.get("parallel")
    if not isinstance(parallel, dict):
        return
    if "fusion" in parallel:
        parallel["tp_overlap"] = parallel.pop("fusion")
    if isinstance(zero := parallel.get("zero"), dict) and "transport" in zero:
        zero["collectives"] = {"collectives": "nccl"}.get(old := zero.pop("transport"), old)
    if isinstance(context := parallel.get("context"), dict) and isinstance(method := context.get("method"), str):
        context["method"] = RENAMED_METHODS.get(method, method)
