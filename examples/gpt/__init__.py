"""The parts of examples/train_gpt.py, one idea a file."""
