"""What is asked: every setting with its meaning, and how command lines and YAML become one typed object. Imports no torch."""
from trainer.config.fields import ConfigError
from trainer.config.model import ModelSpec
from trainer.config.schema import (
    ActivationConfig,
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
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

__all__ = [
    "ActivationConfig", "BatchConfig", "CheckpointConfig", "Config", "ConfigError", "DataConfig", "EvalConfig", "GradCommConfig",
    "GuardConfig", "HopConfig", "LearningRateConfig", "LoggingConfig", "LossConfig", "ModelConfig", "ModelSpec", "OptimizerConfig",
    "ParallelConfig", "ParameterTypes", "PipelineConfig", "PrecisionConfig", "RunConfig", "SourceConfig", "TypePolicy",
    "WandbConfig", "ZeroConfig"]
