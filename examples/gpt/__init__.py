"""The parts of examples/train_gpt.py, one concern per file."""
