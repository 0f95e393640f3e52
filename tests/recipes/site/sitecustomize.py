"""Let torchvision be imported beside a torch without CUDA, which its wheels from the index are not made for."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

# A declaration lasts as long as its library.
LIBRARIES: list[Any] = []


class OperatorFinder(MetaPathFinder):
    """Before torchvision is imported: declare the two operators that its import asks for. No recipe calls them."""

    def find_spec(self, module: str, path: object, target: object = None) -> None:
        """Find nothing: the other finders go on."""
        if module == "torchvision" and not LIBRARIES:
            import torch  # only where torchvision is used

            LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, OperatorFinder())
