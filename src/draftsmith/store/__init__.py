"""The feature store: ragged safetensors shards and a manifest that says what they are."""
