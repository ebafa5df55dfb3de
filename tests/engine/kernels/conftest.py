"""Without a GPU, kernels run in Triton's interpreter."""

from interpreter import interpreter

__all__ = ["interpreter"]
