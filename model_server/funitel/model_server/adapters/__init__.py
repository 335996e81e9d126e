"""LoRA adapters: PEFT folders, their tensors by the matrices of this rank, and the registry of those loaded."""
