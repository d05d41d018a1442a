"""Text from language models, by OpenAI's protocol: /v1/models, /v1/completions and /v1/chat/completions."""
