"""A LoRA checkpoint of LLaVA and the model it was trained on, as one checkpoint: PEFT merges the adapter, and weights
that were trained whole (`non_lora_trainables.bin`: the projector) replace those of the base.
"""

from importlib.util import find_spec
from pathlib import Path

from llava_consensus.errors import DataError, missing_extra
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models.weights import MEND, copy_small_files, new_folder, rewrite, tensors_of
from llava_consensus.hosts.clip import without_unused_report
from llava_consensus.hosts.environment import load_pretrained

SETTINGS, WHOLE = "adapter_config.json", "non_lora_trainables.bin"
PREFIX = "base_model.model."  # of names as PEFT writes them


def merge(lora: Path, base: Path, out: Path) -> str:
    """Writes the merged checkpoint, whole or not at all; returns a line about it."""
    if find_spec("peft") is None:
        raise missing_extra("LoRA checkpoints need peft", "eval")
    if not (lora / SETTINGS).is_file():
        raise DataError(f"{lora}: no {SETTINGS} in it, so it is no LoRA checkpoint")
    import transformers
    from peft import PeftModel

    kind = str(read_json(base / "config.json", MEND, dict).get("model_type"))
    # the class without a vision tower, which the adapter does not touch
    cls = transformers.MistralForCausalLM if "mistral" in kind else transformers.LlamaForCausalLM
    with new_folder(out, lora) as fresh:
        with without_unused_report():
            model = load_pretrained(cls, base, torch_dtype="auto")
        adapted = PeftModel.from_pretrained(model, lora)
        names = [f"{name}.weight" for name in adapted.targeted_module_names]
        state = adapted.merge_and_unload().state_dict()
        values = {name: state[name] for name in names}
        if (lora / WHOLE).is_file():
            values |= {name.removeprefix(PREFIX): value for name, value in tensors_of(lora / WHOLE)}
        count = rewrite(base, fresh, values)
        copy_small_files(base, fresh)
        copy_small_files(lora, fresh)
        (fresh / SETTINGS).unlink()
    return f"{count} tensors, {len(names)} of them adapted: {out}"
