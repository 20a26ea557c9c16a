"""What is asked: every setting with its meaning, and how command lines and YAML become one typed object. Imports no
torch."""

from trainer.config import register  # noqa: F401
from trainer.config.fields import ConfigError  # noqa: F401
from trainer.config.model import ModelSpec  # noqa: F401
from trainer.config.schema import (  # noqa: F401
    ActivationConfig,
    BatchConfig,
    CheckpointConfig,
    Config,
    ContextConfig,
    CorpusConfig,
    DataConfig,
    EvalConfig,
    Float8Config,
    GenerateConfig,
    GradCommConfig,
    GuardConfig,
    HopConfig,
    LearningRateConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterTypes,
    PipelineConfig,
    PrecisionConfig,
    RunConfig,
    SourceConfig,
    TypePolicy,
    WandbConfig,
    ZeroConfig,
)
