"""Processors of transformers for texts and images, made without torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_processor(kind: type[Any]) -> bool:
    """Return whether ``kind`` is a processor of transformers, which contains a tokenizer."""
    from transformers import ProcessorMixin

    return issubclass(kind, ProcessorMixin)


def processor_of_texts(kind: type[Any], tokenizer: Any, image_settings: Mapping[str, Any]) -> Any:
    """Return a processor of class ``kind`` with ``tokenizer``, and the model's image processor with
    ``image_settings``. It has no processor of videos, because those need torchvision."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    def check(self: Any, name: str, value: Any) -> Any:
        return None if value is None else kind.check_argument_for_proper_class(self, name, value)

    attributes: dict[str, Any] = dict.fromkeys(kind.get_attributes())
    attributes["tokenizer"] = tokenizer
    model = kind.__module__.split(".")[-2]  # transformers.models.qwen3_vl.processing_qwen3_vl
    if "image_processor" in attributes and model in IMAGE_PROCESSOR_MAPPING_NAMES:
        name = IMAGE_PROCESSOR_MAPPING_NAMES[model]["pil"]
        attributes["image_processor"] = getattr(transformers, name)(**image_settings)
    members = {"__module__": kind.__module__, "check_argument_for_proper_class": check}
    video_free = type(kind.__name__, (kind,), members)
    return video_free(**attributes, chat_template=tokenizer.chat_template)
