"""The configuration schema: every setting, its default, meaning, unit and legal values, once.

`compose.py` fills these dataclasses from YAML groups; the rest of the project receives the typed object.
This module imports no torch, so that `--cfg job` and typos answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config.fields import option
from trainer.config.model import ModelSpec
from trainer.config.registry import CALLBACKS, LOSS_TERMS, METRICS, OPTIMIZERS, SCHEDULES, SINKS, SOURCES


@dataclass
class RunConfig:
    name: str = option("run", "name of the run; its folder is runs/NAME unless run.dir says otherwise")
    dir: str = option("runs/${run.name}", "folder of everything the run writes")
    seed: int = option(
        0, "seeds the initial weights (with each parameter's name) and the order of the data", range="[0, inf)"
    )
    steps: int = option(100, "training length", unit="optimizer steps", range="[1, inf)")
    tokens: int | None = option(
        None,
        "training length in tokens, instead of run.steps: as many steps as it takes; 20e9 is a number, too",
        unit="tokens",
        range="[1, inf)",
    )
    hours: float | None = option(
        None,
        "save and end with exit code 75 before a start has taken so long; the same command goes on",
        unit="hours",
        range="(0, inf)",
    )
    device: str = option("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))
    deterministic: bool = option(False, "deterministic kernels: the same plan gives the same bits")
    cuda_graphs: bool = option(
        False,
        "each process replays its training step as one CUDA graph, with collectives over NCCL: small models then wait "
        "for no host",
    )
    force: bool = option(False, "go on although the model's states will not fit into memory, by what is predicted")


@dataclass
class ModelConfig(ModelSpec):
    from_hf: str | None = option(
        None,
        "folder with config.json and safetensors of a transformers model: its architecture replaces the other model "
        "fields, its weights are where training starts",
    )
    code: str = option(
        "auto",
        "with from_hf: whose code runs the model: spec, the blocks of this project; transformers, its own unmodified "
        "code; auto, the former where they have the type of the model",
        ("auto", "spec", "transformers"),
    )
    code_unproven: bool = option(
        False,
        "with from_hf: a type of transformers that is not accepted yet runs by its own code, after the gradients of a "
        "small copy have been compared with transformers, on the CPU in seconds; parallel.tp=1",
    )
    extend: dict[str, Any] = option(
        {},
        "with from_hf: positions for longer sequences than those of that model: max_length, and fields of "
        "model.attention.rope, such as {max_length: 131072, scaling: yarn, factor: 16.0, original_length: 8192}",
    )


@dataclass
class CorpusConfig:
    """One corpus."""

    kind: str = option(
        "stdlib",
        "the running interpreter's own library, local files, a hub name, conversations (jsonl or parquet), ready-made "
        "token files, or a registered kind",
        SOURCES,
    )
    path: str | None = option(
        None,
        "file, folder or glob (text, jsonl, parquet, chat, tokens), on a disk or in an object store (s3://, gs://), or "
        "hub name (hub)",
    )
    field: str = option("text", "column that holds the text (jsonl, parquet, hub)")
    messages: str = option("messages", "column that holds the conversation, a list of messages (chat)")
    subset: str | None = option(None, "hub configuration name")
    split: str = option("train", "hub split")
    streaming: bool = option(False, "read and tokenise while training instead of before (hub, parquet, jsonl, text)")
    limit: int = option(0, "read at most this many documents; 0 means all", unit="documents", range="[0, inf)")
    dtype: str = option(
        "auto",
        "element type of token files (tokens); auto reads it from the file, or, where that does not tell, from the "
        "vocabulary size",
        ("auto", "uint16", "uint32"),
    )
    settings: dict[str, Any] = option({}, "settings of a registered kind, by its name", registry=SOURCES)


@dataclass
class SourceConfig(CorpusConfig):
    """One corpus to train on."""

    weight: float = option(1.0, "share of this source among all, before normalisation", range="[0, inf)")
    max_tokens: int | None = option(
        None,
        "most tokens of this source over the run; then the other sources share its place; null: no limit",
        unit="tokens",
        range="[1, inf)",
    )
    max_epochs: float | None = option(
        None, "most passes over this source, as max_tokens; not for a stream", unit="epochs", range="(0, inf)"
    )


@dataclass
class StageConfig:
    """A change of the mixture in the course of the run."""

    start: int = option(1, "tokens of the run after which the stage begins", unit="tokens", range="[1, inf)")
    weights: dict[str, float] = option(
        {}, "weight of each source from then on, by name; a source that is not named has none"
    )


@dataclass
class DocumentsConfig:
    """How long documents are, for predictions."""

    mean: float | None = option(
        None,
        "tokens of a masked document in the mean, by which the time of attention is predicted; null: measured where "
        "the corpus is at hand, tokenised",
        unit="tokens",
        range="[1, inf)",
    )
    median: float | None = option(
        None, "the same in the median; null: 0.43 of the mean", unit="tokens", range="[1, inf)"
    )


@dataclass
class DataConfig:
    sources: dict[str, SourceConfig] = option({"stdlib": SourceConfig()}, "corpora by name, mixed by weight")
    stages: dict[str, StageConfig] = option({}, "changes of the weights in the course of the run, by name")
    tokenizer: str = option(
        "bpe",
        "bpe (trained once on the sources; with model.from_hf, the tokenizer in that folder), bytes (256 bytes and an "
        "end mark), or the path of a tokenizer.json or of a transformers tokenizer folder",
    )
    vocab_size: int = option(4096, "size of a trained bpe tokenizer", unit="tokens", range="[1, inf)")
    chat_template: str | None = option(
        None, "Jinja file of the template of conversations (chat); null means the one in the tokenizer's folder"
    )
    bos: str = option(
        "auto",
        "whether every document begins with BOS, in training, evaluation and prompts: true, false, or auto (as the "
        "tokenizer's post-processor does, and in a resumed run as before); conversations and token files are as their "
        "template or writer made them",
        ("auto", "true", "false"),
    )
    cache: str = option("~/.cache/trainer", "folder of trained tokenizers and tokenised corpora")
    eval_fraction: float = option(0.01, "share of the documents held out for evaluation", range="[0, 1)")
    mask_documents: bool = option(False, "packed documents do not attend to each other")
    documents: DocumentsConfig = option(DocumentsConfig(), "how long masked documents are, for predictions")
    on_error: str = option(
        "stop",
        "a line or row that cannot be read or holds no text (text, jsonl, parquet, chat, hub) ends the run, or is left "
        "out and counted",
        ("stop", "skip"),
    )
    max_damaged: float = option(
        0.01, "skip: largest share of a corpus's lines or rows that may be left out", range="[0, 1]"
    )
    workers: int = option(0, "processes that tokenise; 0 means one a core", range="[0, inf)")
    prefetch: int = option(2, "optimizer steps prepared ahead by a thread", unit="steps", range="[0, inf)")


@dataclass
class BatchConfig:
    """Two of the sizes are enough: global = micro x accumulation x data-parallel ranks."""

    sequence_length: int = option(512, "tokens per sequence", unit="tokens", range="[1, inf)")
    global_size: int | None = option(
        None, "sequences per optimizer step over all ranks", unit="sequences", range="[1, inf)"
    )
    global_tokens: int | None = option(
        None, "the same in tokens: global_size x sequence_length", unit="tokens", range="[1, inf)"
    )
    micro_size: int | None = option(None, "sequences per rank in one forward pass", unit="sequences", range="[1, inf)")
    accumulation: int | None = option(None, "micro-batches per optimizer step", range="[1, inf)")


@dataclass
class ZeroConfig:
    stage: int = option(0, "0 replicates; 1 shards optimizer state; 2 also gradients; 3 also parameters", (0, 1, 2, 3))
    offload: bool = option(False, "keep sharded parameters, gradients and optimizer state in host memory")
    engine: str = option(
        "torch",
        "what shards and updates: torch (FSDP2), or DeepSpeed: stage 1 under any tp x pp, stages 2 and 3 with data "
        "parallelism alone",
        ("torch", "deepspeed"),
    )
    collectives: str = option(
        "auto",
        "how parameters are gathered and gradients added up: nccl (gloo on CPUs), copy_engine (copies between "
        "the GPUs of a node, which take no multiprocessor and no flat buffers; gradients travel in the type in which "
        "they were computed and are added up in fp32), or auto (copy_engine where two GPUs of a node share states, can "
        "share memory, and the rest of the plan allows it; nccl elsewhere)",
        ("auto", "nccl", "copy_engine"),
    )
    nvme: str | None = option(
        None, "deepspeed, stage 3: folder on a local disk, in which parameters and optimizer state live instead"
    )
    deepspeed: dict[str, Any] = option(
        {}, "deepspeed: more of its own configuration, such as {zero_optimization: {sub_group_size: 1e8}}"
    )


@dataclass
class PipelineConfig:
    """How micro-batches go through the stages. Their number is batch.accumulation."""

    schedule: str = option(
        "1f1b",
        "gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v, greedy (planned from the layers' "
        "costs), auto (measures the layers, then chooses), or the path of a CSV file in torch's notation",
    )
    chunks: int | None = option(
        None,
        "stages on each rank; null means what the schedule wants (2 for interleaved)",
        unit="stages",
        range="[1, inf)",
    )
    split: Any = option(
        "balanced",
        "layers of each stage: balanced (by cost, embedding and head counted), even (by number), or a list such as "
        "[9, 8, 8, 7]",
    )
    memory_cap: float | None = option(
        None,
        "greedy, auto: largest number of micro-batches whose activations a rank keeps; null means parallel.pp for "
        "greedy, and what the device holds for auto",
        unit="micro-batches",
        range="[1, inf)",
    )


@dataclass
class HopConfig:
    """How gradients travel over one kind of link."""

    codec: str = option(
        "none",
        "type of the gradients on the way: none (that of precision.reduce), int8 with a scale for each 256 elements, "
        "or int4 with one for each 128",
        ("none", "int8", "int4"),
    )
    error_feedback: str = option(
        "none",
        "classic adds the quantisation errors of earlier steps to the next gradient; they are kept in fp32, twice",
        ("none", "classic"),
    )


@dataclass
class GradCommConfig:
    """Quantised gradient communication. Which parameters take part: precision.types."""

    inner: HopConfig = option(HopConfig(), "between ranks that share one copy of the sharded state, within a node")
    outer: HopConfig = option(HopConfig(), "between replicas, and between nodes")
    min_size: int = option(
        65536,
        "what a reduction has of a layer (or of embedding and head) travels as it is if it has fewer bytes in fp32",
        unit="bytes",
        range="[0, inf)",
    )


@dataclass
class ContextConfig:
    """How the ranks that share a sequence bring its queries and keys together. Exact for every mask."""

    method: str = option(
        "auto",
        "allgather (each rank gathers the keys and values of the whole sequence), ulysses (all-to-all into heads and "
        "back), hybrid (ulysses among neighbours on a node, allgather among groups of them), auto (the fastest by the "
        "rate of attention's kernel, the balance of the order and the bytes that are sent; the all-to-all never leaves "
        "a node)",
        ("auto", "allgather", "ulysses", "hybrid"),
    )
    order: str = option(
        "auto",
        "which parts of a sequence a rank holds: zigzag (an early and a late one, which balances causal attention), "
        "blocks (many, of 128 tokens where they divide the length, which balances packed documents); auto: the faster "
        "one on GPUs",
        ("auto", "zigzag", "blocks"),
    )


@dataclass
class ParallelConfig:
    dp: int = option(-1, "data-parallel ranks; -1 takes what is left", unit="ranks")
    shard: int = option(
        -1, "ranks that share one copy of the sharded state (HSDP when below dp x cp); -1 means dp x cp", unit="ranks"
    )
    tp: int = option(1, "tensor-parallel ranks", unit="ranks", range="[1, inf)")
    tp_across_nodes: bool = option(False, "allow tensor-parallel groups that span nodes, whose links are much slower")
    tp_overlap: str = option(
        "off",
        "products of tensor-parallel ranks and their collectives: off (one after the other), copy_engine (copy "
        "engines move tokens and sums between the GPUs of a node meanwhile)",
        ("off", "copy_engine"),
    )
    cp: int = option(1, "context-parallel ranks, which share each sequence", unit="ranks", range="[1, inf)")
    context: ContextConfig = option(ContextConfig(), "how context-parallel ranks share a sequence")
    ep: int = option(
        1,
        "neighbouring ranks that share the experts of a layer: any of the data-, context- and tensor-parallel ranks of "
        "a pipeline stage",
        unit="ranks",
        range="[1, inf)",
    )
    ep_dispatch: str = option(
        "auto",
        "how tokens reach their experts: alltoall (a row for each choice of a token), allgather (each token once to "
        "all of these ranks), shared_memory (as allgather, by kernels that read and write the memory of the other GPUs "
        "of a node), alltoall_overlap (as alltoall, overlapped with computation: the forward pass of a micro-batch is "
        "interleaved with the backward pass of another), auto (alltoall or allgather, whichever is predicted to be "
        "faster)",
        ("auto", "alltoall", "allgather", "shared_memory", "alltoall_overlap"),
    )
    ep_capacity: float = option(
        0.0,
        "rows of experts that a rank has room for, as a multiple of the mean over the ranks of parallel.ep; a step "
        "that needs more is run again with room for all; 0: as many as arrive, for whose number the host waits in "
        "each layer",
        range="[0, inf)",
    )
    pp: int = option(1, "pipeline-parallel ranks", unit="ranks", range="[1, inf)")
    pipeline: PipelineConfig = option(PipelineConfig(), "how micro-batches go through the pipeline")
    zero: ZeroConfig = option(ZeroConfig(), "what the data-parallel ranks share")
    grad_comm: GradCommConfig = option(GradCommConfig(), "how data-parallel ranks send gradients")


FLOAT8_RECIPES = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


@dataclass
class TypePolicy:
    """How parameters of one type are optimised."""

    optimizer: str | None = option(None, "optimizer of this type; null means optimizer.name", OPTIMIZERS)
    state_dtype: str = option("fp32", "type that the optimizer's moments are kept in", ("fp32", "bf16"))
    weight_decay: float | None = option(
        None, "decoupled weight decay; null means optimizer.weight_decay", range="[0, inf)"
    )
    lr_scale: float = option(1.0, "factor on the learning rate", range="[0, inf)")
    quantise: bool = option(True, "gradients may be quantised on their way (parallel.grad_comm)")
    float8: str | None = option(
        None, "matrices: recipe of their products in fp8; null means precision.float8.recipe", FLOAT8_RECIPES
    )


@dataclass
class ParameterTypes:
    """The parameter-type map: by role of the parameter, refined by rules on names (the last match wins)."""

    embedding: TypePolicy = option(TypePolicy(weight_decay=0.0), "token and position embeddings")
    norm: TypePolicy = option(TypePolicy(weight_decay=0.0, quantise=False), "norm weights and biases")
    bias: TypePolicy = option(TypePolicy(weight_decay=0.0, quantise=False), "biases of projections")
    head: TypePolicy = option(TypePolicy(), "output projection to the vocabulary")
    matrix: TypePolicy = option(TypePolicy(), "all other projections")
    rules: dict[str, Any] = option({}, "by shell pattern on the parameter's global name: {layers.0.*: {lr_scale: 0.1}}")


@dataclass
class Float8Config:
    """Linear layers whose products are in fp8, with scales that follow from each operand; the rest of the model is in
    `precision.compute`."""

    recipe: str = option(
        "none",
        "tensorwise: one scale for each operand, gradients in e5m2; rowwise: one for each row of it, e4m3 everywhere; "
        "rowwise_with_gw_hp: the same, weight gradients in precision.compute; blockwise: one for each 128 elements of "
        "a row, of weights for 128 x 128; none: no fp8; precision.types may say another one by name",
        FLOAT8_RECIPES,
    )
    linears: list[str] = option(
        ["*"],
        "which linear layers, by shell patterns on their names, such as '*.feed_forward.*'; the output projection is "
        "none of them",
    )
    ends: int = option(
        1, "layers at the beginning and at the end of the model that have none", unit="layers", range="[0, inf)"
    )
    gather: bool = option(
        False, "tensorwise: ZeRO gathers their matrices in fp8, half the bytes, with the same numbers in the products"
    )


@dataclass
class PrecisionConfig:
    compute: str = option("fp32", "type of forward and backward; parameters are kept in fp32", ("fp32", "bf16", "fp16"))
    reduce: str = option("fp32", "type in which gradients are reduced over ranks", ("fp32", "bf16"))
    matmul: str = option("highest", "fp32 matrix products: highest is exact, high allows TF32", ("highest", "high"))
    loss_scale: float = option(65536.0, "fp16: first loss scale", range="(0, inf)")
    float8: Float8Config = option(Float8Config(), "products in fp8")
    types: ParameterTypes = option(ParameterTypes(), "parameter-type map")


@dataclass
class ActivationConfig:
    """What the backward pass finds saved, and what it recomputes."""

    mode: str = option(
        "none",
        "none saves all; full recomputes whole blocks; selective recomputes all but `save`; auto chooses `save` by "
        "predicted seconds and memory",
        ("none", "full", "selective", "auto"),
    )
    save: list[str] = option(
        ["attention", "matmul/2"],
        "selective: operations whose outputs are kept; 'attention', 'matmul', products such as 'attention.q' and "
        "'feed_forward.*', any aten name such as 'aten.mm', or 'all'; NAME/2 keeps every second call, NAME@4-31 those "
        "of these layers, NAME@1-31/2 of every second of them",
    )
    tile: int | None = option(
        None,
        "tokens of a rank that feed-forward blocks compute at a time, and again in backward; 0: all; auto: 8192 where "
        "the predicted memory of all does not fit",
        unit="tokens",
        range="[0, inf)",
    )
    offload: bool | None = option(
        None,
        "full, selective, auto: the inputs of recomputed layers wait in host memory, copied behind "
        "computation; auto: where the predicted memory needs it",
    )
    memory: float | None = option(
        None,
        "what a rank's predicted peak may take, where auto decides mode, tile or offload; null: 92% of what is free on "
        "a GPU at the start, of a machine's memory on CPUs",
        unit="GiB",
        range="(0, inf)",
    )
    hardware: str | None = option(
        None,
        "mode=auto: how fast operations are, a file of configs/hardware or the path of one that `trainer probe` wrote; "
        "null: that of the device",
    )


@dataclass
class LossConfig:
    z_loss: float = option(
        0.0,
        "factor of the squared log-normaliser, added to each token's loss (PaLM, arXiv 2204.02311: 1e-4)",
        range="[0, inf)",
    )
    chunk: int = option(2048, "tokens whose fp32 logits exist at a time; 0 means all", unit="tokens", range="[0, inf)")
    tile: int | None = option(
        None,
        "tokens of a rank whose logits exist at a time, in the compute type too; 0: all; auto: 8192 where the "
        "predicted memory of all does not fit",
        unit="tokens",
        range="[0, inf)",
    )
    terms: dict[str, Any] = option(
        {}, "registered terms by name, with their settings, added to each token's loss", registry=LOSS_TERMS
    )


@dataclass
class MuonConfig:
    """Muon, for parameters whose optimizer it is."""

    compute: str = option("bf16", "type of the iteration, and of what travels between ranks for it", ("bf16", "fp32"))


@dataclass
class EmaConfig:
    """An exponential moving average of the weights, in fp32, sharded as they are."""

    decay: float = option(
        0.0, "share of the average that an update keeps, such as 0.999; 0 keeps no average", range="[0, 1)"
    )


@dataclass
class OptimizerConfig:
    name: str = option(
        "adamw", "optimizer; muon is for hidden matrices, and leaves all other parameters to adamw", OPTIMIZERS
    )
    beta1: float = option(0.9, "decay of the first moment (momentum for sgd)", range="[0, 1)")
    beta2: float = option(0.95, "decay of the second moment", range="[0, 1)")
    eps: float = option(1e-8, "added to the root of the second moment", range="(0, inf)")
    weight_decay: float = option(0.1, "decoupled weight decay", range="[0, inf)")
    clip_norm: float = option(1.0, "largest global gradient norm; 0 means no clipping", range="[0, inf)")
    muon: MuonConfig = option(MuonConfig(), "muon")
    ema: EmaConfig = option(EmaConfig(), "average of the weights")
    settings: dict[str, Any] = option({}, "settings of registered optimizers, by name", registry=OPTIMIZERS)


@dataclass
class LearningRateConfig:
    schedule: str = option("cosine", "shape after the warm-up", SCHEDULES)
    peak: float = option(3e-4, "learning rate after the warm-up", range="(0, inf)")
    warmup: int = option(10, "linear warm-up from zero", unit="steps", range="[0, inf)")
    final: float = option(0.1, "last learning rate as a share of peak", range="[0, 1]")
    decay: int = option(
        0, "wsd: length of the final decay; 0 means a fifth of run.steps", unit="steps", range="[0, inf)"
    )
    settings: dict[str, Any] = option({}, "settings of a registered schedule, by its name", registry=SCHEDULES)


@dataclass
class CheckpointConfig:
    every: int = option(0, "save every n steps; 0 saves at the end and on signals only", unit="steps", range="[0, inf)")
    at_end: bool = option(True, "save when the last step is done")
    asynchronous: bool = option(True, "train on while the checkpoint is written")
    keep_last: int = option(2, "newest checkpoints kept; 0 keeps all", range="[0, inf)")
    keep_every: int = option(
        0, "checkpoints at multiples of this many steps are kept for good; 0 means none", unit="steps", range="[0, inf)"
    )
    resume: str = option(
        "auto",
        "auto (newest valid one of the run, if any), none, or the path or URL of a checkpoint or of a run; what an "
        "earlier run left in run.dir and this one does not go on from is moved to earlier/ in it",
    )
    upload: str | None = option(
        None,
        "URL in an object store (s3://BUCKET/runs/NAME) to which complete checkpoints are copied in the background, "
        "and from which a start resumes that finds no newer one in run.dir; null: none",
    )
    data: str = option(
        "continue",
        "on resume: continue where the data stopped, or restart at the first sample (for other data)",
        ("continue", "restart"),
    )
    peer_every: int = option(
        0,
        "copy the state into host memory every n steps, with several nodes also to another node, to resume from after "
        "a fault; takes up to 3 times the bytes of a rank's state in host memory on one node, 5 times on several; 0 "
        "means never",
        unit="steps",
        range="[0, inf)",
    )
    peer_folder: str = option("/dev/shm", "memory file system of each node for the copies of checkpoint.peer_every")


@dataclass
class GenerateConfig:
    """Text that the model writes while it is trained. Nothing else of the run depends on it."""

    every: int = option(
        0, "continue the prompts every n steps and after the last; 0 means never", unit="steps", range="[0, inf)"
    )
    prompts: list[str] = option([""], "texts to continue; an empty one starts a new document")
    tokens: int = option(64, "most tokens of each continuation", unit="tokens", range="[1, inf)")


@dataclass
class EvalConfig:
    every: int = option(0, "evaluate every n steps and after the last; 0 means never", unit="steps", range="[0, inf)")
    at_start: bool = option(False, "evaluate before the first step, too")
    sequences: int = option(
        64, "sequences per evaluation, held-out ones and of each set", unit="sequences", range="[1, inf)"
    )
    sets: dict[str, CorpusConfig] = option({}, "more corpora to evaluate on, by name, each for itself and whole")
    ema: bool = option(False, "evaluate the average of the weights (optimizer.ema.decay) in their place")
    generate: GenerateConfig = option(GenerateConfig(), "texts that the model continues now and then")


@dataclass
class GuardConfig:
    max_skipped: int = option(
        10,
        "stop after this many steps in a row without an update for a non-finite loss or gradient",
        unit="steps",
        range="[1, inf)",
    )
    stall_factor: float = option(
        10.0,
        "a run without progress for this many times its median step ends itself, with the stacks of all ranks, to be "
        "started again; 0 means never",
        unit="median steps",
        range="[0, inf)",
    )
    stall_seconds: float = option(300.0, "but not before so long without progress", unit="seconds", range="(0, inf)")
    stall_allowance: float = option(
        900.0,
        "the same for what is not an ordinary step: the start, the first steps (which compile), evaluations, saves, a "
        "new schedule",
        unit="seconds",
        range="(0, inf)",
    )
    slow_factor: float = option(
        1.25,
        "a run is called slow when its median step takes this many times that of its fastest recent time, and a rank "
        "when its forward passes take this many times the median of its peers'",
        range="(1, inf)",
    )
    slow_lines: int = option(
        20,
        "so many logged steps are compared with as many before them, and a slow rank is the slowest in most of them",
        unit="logged steps",
        range="[3, inf)",
    )
    compare_every: int = option(
        100,
        "compare what several ranks hold of the same tensors after every n-th step and before each save; a difference "
        "is a hardware fault and ends the run; 0 means never",
        unit="steps",
        range="[0, inf)",
    )


@dataclass
class WandbConfig:
    enabled: bool = option(False, "log to Weights & Biases; offline where no key is set")
    project: str = option("trainer", "project")


@dataclass
class LoggingConfig:
    every: int = option(1, "log every n steps", unit="steps", range="[1, inf)")
    console: str = option(
        "auto",
        "rich progress bar, plain lines, or nothing; auto: rich on a terminal",
        ("auto", "rich", "plain", "none"),
    )
    tensorboard: bool = option(False, "write TensorBoard events to the run folder")
    wandb: WandbConfig = option(WandbConfig(), "Weights & Biases")
    profile: int = option(
        0, "profile every n-th step on a few ranks, for the account of where its time went; 0: never", range="[0, inf)"
    )
    trace: list[int] = option([], "steps that are profiled too, and whose traces stay in traces/", range="[1, inf)")
    show: list[str] = option(
        [], "tables that are printed at the start beside the plan: model (its parameters), types (their types)"
    )
    report: bool = option(True, "write report.html, a page about the run, when it ends")
    hardware: float = option(
        1.0,
        "time between two readings of the counters of devices and machines (metrics hardware/*); 0 reads none",
        unit="seconds",
        range="[0, inf)",
    )
    metrics: dict[str, Any] = option(
        {}, "registered metrics by name, with their settings: {weight_norm: {}}", registry=METRICS
    )
    sinks: dict[str, Any] = option(
        {}, "registered sinks by name, with their settings: where lines of metrics go besides", registry=SINKS
    )


@dataclass
class Config:
    run: RunConfig = option(RunConfig(), "the run")
    model: ModelConfig = option(ModelConfig(), "the model spec")
    data: DataConfig = option(DataConfig(), "the corpus")
    batch: BatchConfig = option(BatchConfig(), "batch arithmetic")
    parallel: ParallelConfig = option(ParallelConfig(), "the plan")
    precision: PrecisionConfig = option(PrecisionConfig(), "numeric types")
    activation: ActivationConfig = option(ActivationConfig(), "recompute")
    loss: LossConfig = option(LossConfig(), "the loss")
    optimizer: OptimizerConfig = option(OptimizerConfig(), "the optimizer")
    lr: LearningRateConfig = option(LearningRateConfig(), "learning-rate schedule")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "saving and resuming")
    eval: EvalConfig = option(EvalConfig(), "evaluation on held-out data")
    guard: GuardConfig = option(GuardConfig(), "when a run ends itself: non-finite steps, no progress; slow ranks")
    logging: LoggingConfig = option(LoggingConfig(), "metrics")
    compile: bool = option(False, "compile each block with torch.compile")
    imports: list[str] = option(
        [], "modules that are imported first, and register data sources, optimizers, callbacks and more"
    )
    callbacks: dict[str, Any] = option(
        {},
        "registered callbacks by name, with their settings, in the order in which they are called",
        registry=CALLBACKS,
    )
