"""Lets vLLM's LLaVA load where there is no torchvision: with this directory on its path, Python runs this in every process.

`vllm.model_executor.models.llava` imports its Pixtral too, and that one a module of transformers which needs torchvision, for
functions of Pixtral's image sizes. vLLM's CPU build does without torchvision; a LLaVA with a CLIP needs none of them.
"""

import importlib.util
import sys
import types

if importlib.util.find_spec("torchvision") is None:
    _pixtral = types.ModuleType("transformers.models.pixtral.image_processing_pixtral")

    def _absent(*arguments: object) -> None:
        raise NotImplementedError("Pixtral's images need torchvision")

    vars(_pixtral).update(_num_image_tokens=_absent, get_resize_output_image_size=_absent)
    sys.modules[_pixtral.__name__] = _pixtral
