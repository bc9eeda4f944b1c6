"""Official LLaVA 1.5 and 1.6 (the `llava` package), with Llama and Mistral language models.

Importing it refuses versions of transformers on which that package does not run, 4.38 to 5.18: the metadata of this
project can only say what models of transformers need.
"""

from importlib.metadata import version

from llava_consensus.errors import OptionError

_installed = tuple(int(part) for part in version("transformers").split(".")[:2])
if _installed != (4, 37) and _installed < (5, 19):
    raise OptionError(
        f"transformers {version('transformers')}: official LLaVA runs here on 4.37.2, its own pin, and on 5.19 or "
        "newer. Type: pip install 'transformers>=5.19,<6'"
    )
