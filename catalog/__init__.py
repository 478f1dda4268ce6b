"""Model shapes and GPUs: the numbers that memory and time follow from, each with its source."""

from catalog.errors import CatalogError
from catalog.gpus import PeakFlops, gpu_names, load_gpu, peak_flops
from catalog.hf_config import shape_from_config
from catalog.models import load_model, model_names
from catalog.parameters import (
    ParameterCount,
    attention_parameters,
    count_parameters,
    num_active_parameters,
    num_parameters,
)
from catalog.shapes import (
    DTYPE_BITS,
    GPU,
    AttentionLayers,
    KVDtype,
    ModelShape,
    WeightDtype,
    pipeline_stage,
)

__all__ = [
    "DTYPE_BITS",
    "GPU",
    "AttentionLayers",
    "CatalogError",
    "KVDtype",
    "ModelShape",
    "ParameterCount",
    "PeakFlops",
    "WeightDtype",
    "attention_parameters",
    "count_parameters",
    "gpu_names",
    "load_gpu",
    "load_model",
    "model_names",
    "num_active_parameters",
    "num_parameters",
    "peak_flops",
    "pipeline_stage",
    "shape_from_config",
]
