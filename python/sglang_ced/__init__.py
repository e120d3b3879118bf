"""SGLang backend for causal encoder-decoder language models (DeepSeek-V4.1-Flash and its kin)."""

__version__ = "0.1.0"
