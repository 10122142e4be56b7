"""The config of a run: `TrainConfig` and its sections, and `load`, which reads one from a file."""

from mesh_lm.config.files import load as load
from mesh_lm.config.run import CheckpointConfig as CheckpointConfig
from mesh_lm.config.run import DataConfig as DataConfig
from mesh_lm.config.run import HealthConfig as HealthConfig
from mesh_lm.config.run import LaunchConfig as LaunchConfig
from mesh_lm.config.run import ModelConfig as ModelConfig
from mesh_lm.config.run import PipelineConfig as PipelineConfig
from mesh_lm.config.run import ProfileConfig as ProfileConfig
from mesh_lm.config.run import TrainConfig as TrainConfig
from mesh_lm.config.run import TrainLoop as TrainLoop
from mesh_lm.config.run import as_dict as as_dict
from mesh_lm.fields import expert as expert
from mesh_lm.fields import option as option
from mesh_lm.optim.config import DilocoConfig as DilocoConfig
from mesh_lm.optim.config import OptimizerConfig as OptimizerConfig
