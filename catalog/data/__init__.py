"""Data files: models.json and gpus.json."""
