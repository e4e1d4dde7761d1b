import os

# Before huggingface_hub is imported: a test that names no model on purpose must not look for it on the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
