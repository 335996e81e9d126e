"""The table of decoders: Hugging Face architecture -> its row. A new family is a row of `families`.

Source for every row: the field names of the family's `config.json` and the tensor names of its checkpoints.
"""

from collections.abc import Mapping

from funitel.model_server.registry.families import (
    bloom,
    cohere,
    deepseek,
    exaone,
    gemma,
    glm,
    gpt,
    granite,
    hunyuan,
    hybrid,
    llama,
    mixtures,
    olmo,
    phi,
    qwen,
)
from funitel.model_server.registry.rules.row import ArchitectureRow

FAMILIES: Mapping[str, ArchitectureRow] = {
    **llama.ROWS,
    **qwen.ROWS,
    **gemma.ROWS,
    **phi.ROWS,
    **gpt.ROWS,
    **bloom.ROWS,
    **olmo.ROWS,
    **cohere.ROWS,
    **granite.ROWS,
    **glm.ROWS,
    **deepseek.ROWS,
    **exaone.ROWS,
    **hunyuan.ROWS,
    **mixtures.ROWS,
    **hybrid.ROWS,
}
