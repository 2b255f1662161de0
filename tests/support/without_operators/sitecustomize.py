"""torchvision from the package index is built for CUDA; beside a CPU build of torch its operators are missing."""

import sys
from importlib.machinery import PathFinder


class _DefineOperators(PathFinder):
    """Declare the operator that torchvision's Python code registers a kernel for, before it is imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            import torch

            cls.library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                cls.library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DefineOperators)
