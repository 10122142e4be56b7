"""What the user sees of a run: a line or a live bar, TensorBoard and metrics.jsonl, a plot. Nothing here touches the training state."""

from mesh_lm.report.flops import mfu as mfu
from mesh_lm.report.flops import peak_flops as peak_flops
from mesh_lm.report.memory import Memory as Memory
from mesh_lm.report.memory import device_memory_gib as device_memory_gib
from mesh_lm.report.plot import loss_curve as loss_curve
from mesh_lm.report.progress import Progress as Progress
from mesh_lm.report.writer import Writer as Writer
