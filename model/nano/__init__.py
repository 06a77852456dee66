"""The nano model: a small trained `glm_moe_dsa` checkpoint that ships with the project.

Knows where the checkpoint lies, and nothing about loading or running it.
"""

from pathlib import Path


def checkpoint_path() -> Path:
    """Folder that holds `config.json`, the safetensors file, its index, the tokenizer and the chat template."""
    return Path(__file__).resolve().parent / "checkpoint"
