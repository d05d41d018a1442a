"""Decoders of language models, from what Hugging Face's folders say of them: config.json and safetensors."""
